#include "torch_sgmcmc/mclmc.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "host/settings.h"
#include "libtorch/checks.h"
#include "libtorch/operators.h"
#include "libtorch/sampler_impl.h"
#include "ops/mclmc.h"
#include "random/counter.h"

namespace torch_sgmcmc {
namespace {

// Draws the noise of these parameters; returns the products of a step.
at::Tensor SumsOf(const TensorLists& lists, int64_t chains) {
  const NoiseKey key = KeyOf(lists);
  gaussian_(lists.state[1], /*std=*/1.0, key.offsets, key.seed, key.step,
            static_cast<int64_t>(Purpose::kUpdate), key.device_step,
            /*rows=*/std::nullopt, key.num_chains);
  const OptionValues& options = *lists.options;
  Tensors positions = lists.params;
  auto master = lists.masters.begin();
  for (at::Tensor& position : positions) {
    if (HasMaster(position)) position = *master++;
  }
  return mclmc_sums(lists.grads, positions, lists.state[0], lists.state[1], {},
                    options.num_data(), options.prior_precision(), chains,
                    options.prior_mean(), MeansOf(lists.prior_means));
}

// Of a step's move in one coordinate: eps^2 / d.
double VarianceOf(const OptionValues& options) {
  return options.lr() * options.temperature() / options.num_data();
}

class MCLMCImpl : public SamplerImpl {
 public:
  MCLMCImpl() : SamplerImpl("mclmc_step_") {
    progress_.keep("tuning", std::vector<double>());
  }

  double energy_error() const {
    if (!energy_.defined()) return std::numeric_limits<double>::quiet_NaN();
    const at::Tensor sums = energy_.sum(0);
    return Ratio(sums[3].item<double>(),
                 sums[1].item<double>() * static_cast<double>(dimension_));
  }

 protected:
  void prepare(TensorLists& lists) override;
  void prepare_all(std::vector<TensorLists>& lists) override;
  void update(const TensorLists& lists) override {
    SamplerImpl::update(lists);
    if (next_.defined()) {  // a device may have skipped the step
      const at::Tensor is_made = next_.select(1, 0).isfinite().all();
      energy_.copy_(at::where(is_made, next_, energy_));
    }
    next_.reset();
  }
  void check_progress(const NamedValues& progress,
                      const OptionValues& /*options*/) const override {
    if (progress.get<std::vector<double>>("tuning").empty()) return;
    Invalid("Invalid tuning: not finished (finish it in Python)");
  }
  std::vector<std::string> shared_names() const override {
    return {"lr",         "momentum",        "num_data",  "temperature",
            "tune_steps", "energy_variance", "num_chains"};
  }
  const char* why_equal() const override {
    return "the direction is one unit vector over all groups";
  }
  void means_changed() override { forget_move(); }
  void parameters_changed() override {
    noise_.clear();
    energy_.reset();
    next_.reset();
  }

 private:
  // Sets directions to 0 if other parameters move than in the last step: a part
  // of a unit vector is not uniform, nor is it with others. From 0 the operator
  // takes a uniform direction, and no half turn ends the former step.
  void start_again(const std::vector<TensorLists>& lists);
  // Forgets the energy of a move that began with another target.
  void check_target(const std::vector<TensorLists>& lists);
  void forget_move() {
    if (!energy_.defined()) return;
    energy_.select(1, 0).fill_(std::numeric_limits<double>::quiet_NaN());
  }

  // By the parameter's TensorImpl.
  std::unordered_map<const void*, at::Tensor> noise_;
  // The chains' records of energy errors, before and after the step
  // (ops/mclmc.h).
  at::Tensor energy_;
  at::Tensor next_;
  int64_t dimension_ = 0;
  std::vector<double> target_;
};

void MCLMCImpl::start_again(const std::vector<TensorLists>& lists) {
  Tensors known;
  for (auto& group : groups()) {
    for (const at::Tensor& param : group.params()) {
      if (state_of(param)["direction"].defined()) known.push_back(param);
    }
  }
  std::unordered_set<const void*> moving;
  for (const TensorLists& each : lists) {
    for (const at::Tensor& param : each.params) {
      moving.insert(param.unsafeGetTensorImpl());
    }
  }
  const auto moves = [&](const at::Tensor& param) {
    return moving.contains(param.unsafeGetTensorImpl());
  };
  if (known.empty() ||
      (known.size() == moving.size() && std::ranges::all_of(known, moves))) {
    return;
  }
  for (const at::Tensor& param : known) {
    if (!moves(param)) own_state_of(param)["direction"] = at::Tensor();
  }
  for (const TensorLists& each : lists) {
    for (const at::Tensor& param : each.params) {
      own_state_of(param)["direction"] = ZeroState(param);
    }
  }
}

void MCLMCImpl::check_target(const std::vector<TensorLists>& lists) {
  std::vector<double> target{static_cast<double>(dimension_)};
  for (const TensorLists& each : lists) {
    const OptionValues& options = *each.options;
    target.insert(target.end(),
                  {options.num_data(), options.temperature(),
                   options.prior_precision(), options.prior_mean()});
  }
  if (energy_.defined() && target != target_) {
    forget_move();
    energy_.select(1, 3).mul_(target[0] / target_[0]);  // stays per dimension
  }
  target_ = std::move(target);
}

void MCLMCImpl::prepare(TensorLists& lists) {
  Tensors fresh;
  std::vector<int64_t> offsets;
  lists.state.assign(4, {});  // no preconditioners
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const at::Tensor& param = lists.params[i];
    at::Tensor& direction = own_state_of(param)["direction"];
    if (!direction.defined()) {
      direction = ZeroState(param);
      fresh.push_back(direction);
      offsets.push_back(lists.offsets[i]);
    }
    at::Tensor& noise = noise_[param.unsafeGetTensorImpl()];
    if (!noise.defined() || noise.sizes() != param.sizes() ||
        noise.device() != param.device()) {
      noise = ZeroState(param);
    }
    lists.state[0].push_back(direction);
    lists.state[1].push_back(noise);
  }
  if (fresh.empty()) return;
  const NoiseKey key = KeyOf(lists);
  gaussian_(fresh, std::sqrt(VarianceOf(*lists.options)), offsets, key.seed,
            key.step, static_cast<int64_t>(Purpose::kRefreshment),
            key.device_step, /*rows=*/std::nullopt, key.num_chains);
}

void MCLMCImpl::prepare_all(std::vector<TensorLists>& lists) {
  if (lists.empty()) return;
  const OptionValues& options = *lists[0].options;
  const auto tuned = options.get<int64_t>("tune_steps");
  if (tuned > 0 && lists[0].step.get() < tuned) {
    Raise("MCLMC has made ", lists[0].step.get(), " of tune_steps = ", tuned,
          " steps, and C++ does not tune (do it in Python)");
  }
  const int64_t chains = options.chains().value_or(1);
  int64_t numel = 0;
  for (const TensorLists& each : lists) {
    for (const at::Tensor& param : each.params) numel += param.numel();
  }
  if (numel / chains < 2) {
    Raise(
        "MCLMC got a gradient of 1 element (must be at least 2: the direction "
        "is a unit vector, and d - 1 divides)");
  }
  start_again(lists);
  SamplerImpl::prepare_all(lists);
  Tensors all;
  for (const TensorLists& each : lists) {
    all.push_back(SumsOf(each, chains));
    all.back() = all.back().to(all[0].device());
  }
  const at::Tensor sums = at::cat(all);
  dimension_ = numel / chains;
  check_target(lists);
  if (!energy_.defined() || energy_.size(0) != chains) {
    energy_ = at::zeros({chains, kEnergyNumbers}, sums.options());
    forget_move();
  }
  energy_ = energy_.to(sums.device());
  at::Tensor turn;
  std::tie(turn, next_) = mclmc_turn(
      sums, energy_,
      std::sqrt(VarianceOf(options) * static_cast<double>(dimension_)),
      options.number("momentum"), dimension_,
      options.num_data() / options.temperature());
  for (TensorLists& each : lists) {
    each.state[2].assign(each.params.size(), turn.to(each.params[0].device()));
  }
}

const bool kMCLMC = Register<MCLMCOptions, MCLMCImpl>();

}  // namespace

double MCLMC::energy_error() const {
  return static_cast<const MCLMCImpl&>(impl()).energy_error();
}

}  // namespace torch_sgmcmc
