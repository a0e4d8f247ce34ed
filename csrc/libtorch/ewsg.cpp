#include "torch_sgmcmc/ewsg.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/counter.h"
#include "host/closure_watch.h"
#include "host/index_chain.h"
#include "host/ratio.h"
#include "host/settings.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/noise_key.h"
#include "libtorch/core/nonfinite.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/prior.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kEWSGNeedsClosure =
    "EWSG::step() needs a closure, since it draws several minibatches a step:\n"
    "\n"
    "    sampler.step([&] {\n"
    "      auto batch = draw_minibatch();  // a fresh one at each call\n"
    "      auto loss = cross_entropy(net->forward(batch.data), batch.target);\n"
    "      loss.backward();\n"
    "      return loss;\n"
    "    });";

// The operator's number of a surrogate: its place in the table.
int64_t IndexOf(const std::string& surrogate) {
  const auto rows = SettingsOf("EWSG");
  const auto row =
      std::ranges::find(rows, std::string_view("surrogate"), &Setting::name);
  return std::ranges::find(row->words, surrogate) - row->words.begin();
}

Count Sum(const Count& a, const Count& b) {
  if (!b.is_on_device()) {
    if (!a.is_on_device()) return {a.host + b.host};
    return {0, a.device + b.host};
  }
  if (!a.is_on_device()) return {0, b.device + a.host};
  return {0, a.device + b.device.to(a.device.device())};
}

void CheckSameParameters(const std::vector<Work>& current,
                         const std::vector<Work>& proposed) {
  if (!SameParameters(current, proposed)) {
    throw std::runtime_error(
        "EWSG got gradients of other parameters from the closure than at its "
        "first call in this step: minibatches could not be compared");
  }
  for (size_t i = 0; i < current.size(); ++i) {
    for (size_t j = 0; j < current[i].grads.size(); ++j) {
      const at::Tensor& old = current[i].grads[j];
      const at::Tensor& fresh = proposed[i].grads[j];
      if (fresh.numel() > 0 && fresh.const_data_ptr() == old.const_data_ptr()) {
        throw std::runtime_error(
            "EWSG got the gradients of a minibatch in the memory of those of "
            "the minibatch before, which it still needs: the closure must not "
            "reuse gradients");
      }
    }
  }
}

}  // namespace

void EWSGOptions::check_values() const {
  OptionsOf::check_values();
  refuse_capturable();
  if (get<bool>("persistent_index_chain")) {
    Invalid(
        "Invalid persistent_index_chain: true (must be false in C++: continue "
        "it in Python)");
  }
}

void EWSGOptions::check_progress() const {
  CheckPart("num_accepted",
            get<Count>("num_accepted").get(),
            "num_proposals",
            get<int64_t>("num_proposals"));
  const auto drawn = get<int64_t>("num_drawn");
  CheckCount("num_drawn", drawn);
  const auto numbers = get<std::vector<int64_t>>("minibatches");
  const auto expected = static_cast<size_t>(num_chains().value_or(1));
  const bool are_drawn = std::ranges::all_of(
      numbers, [&](int64_t number) { return number >= 0 && number < drawn; });
  if (are_drawn && (numbers.empty() || numbers.size() == expected)) return;
  Invalid("Invalid minibatches: " + std::to_string(numbers.size()) +
          " numbers (must be " + std::to_string(expected) +
          " in [0, num_drawn = " + std::to_string(drawn) + "), or none)");
}

double EWSG::acceptance_rate() const {
  return Ratio(static_cast<double>(progress().get<Count>("num_accepted").get()),
               progress().get<double>("num_proposals"));
}

// NOLINTNEXTLINE(google-default-arguments): as torch's own.
torch::Tensor EWSG::step(LossClosure closure) {
  if (closure == nullptr) Invalid(kEWSGNeedsClosure);
  begin_step();
  const at::NoGradGuard no_grad;
  check_groups();
  const int64_t length = first().index_chain_length();
  const int64_t chains = first().num_chains().value_or(1);
  num_drawn_ = progress().get<int64_t>("num_drawn") + chains;

  torch::Tensor loss = FreshGradients(param_groups_, closure);
  if (rests()) return loss;
  std::vector<Work> work = gather();
  if (work.empty()) {
    throw std::runtime_error(
        "EWSG got no gradients from the closure (does it call backward()?)");
  }
  std::vector<
      std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>
      before;
  for (const Work& lists : work) {
    for (const at::Tensor& param : lists.params) {
      void* key = param.unsafeGetTensorImpl();
      const auto found = state_.find(key);
      before.emplace_back(
          key, found == state_.end() ? nullptr : found->second->clone());
    }
  }
  const auto put_back = [&] {
    for (auto& [key, state] : before) {
      if (state == nullptr) {
        state_.erase(key);
      } else {
        state_[key] = std::move(state);
      }
    }
  };
  Count accepted;
  try {
    // Else it is looked at with what it is compared with.
    if (length == 0 || chains > 1) check_finite(work);
    prepare_all(work);
    for (int64_t proposal = 0; proposal < length; ++proposal) {
      accepted = Sum(accepted, propose(closure, work, proposal));
    }
  } catch (const StepLeftOut&) {
    put_back();
    leave_out();
    progress().put("num_drawn", num_drawn_);
    return loss;
  } catch (...) {
    put_back();
    throw;
  }
  for (const Work& lists : work) {
    for (size_t i = 0; i < lists.params.size(); ++i) {
      lists.params[i].mutable_grad() = lists.grads[i];
    }
  }
  advance(work);

  const int64_t proposals =
      progress().get<int64_t>("num_proposals") + length * chains;
  accepted = Sum(progress().get<Count>("num_accepted"), accepted);
  progress().put("num_proposals", proposals);
  progress().put("num_accepted", accepted);
  progress().put("num_drawn", num_drawn_);
  return loss;
}

// Minibatches are compared on the host.
bool EWSG::looks_later(const std::vector<Work>& /*work*/) const {
  return false;
}

// One step of the index chain: `work` gets the gradients that are then current.
// Returns how many chains accepted the proposal, in a tensor if that would take
// waiting for.
Count EWSG::propose(const LossClosure& closure,
                    std::vector<Work>& work,
                    int64_t proposal) {
  num_drawn_ += first().num_chains().value_or(1);
  FreshGradients(param_groups_, closure);
  std::vector<Work> proposed = gather();
  CheckSameParameters(work, proposed);
  const int64_t chains = first().num_chains().value_or(1);
  if (chains > 1) check_finite(proposed);
  std::vector<at::Tensor> ratios;
  for (size_t i = 0; i < work.size(); ++i) {
    const auto& options = OptionsOfWork<EWSGOptions>(work[i]);
    ratios.push_back(ewsg_log_ratio(work[i].params,
                                    work[i].grads,
                                    proposed[i].grads,
                                    work[i].state[0],
                                    options.lr(),
                                    options.momentum(),
                                    options.num_data(),
                                    options.prior_precision(),
                                    options.temperature(),
                                    work[i].momentum_scale,
                                    IndexOf(options.surrogate()),
                                    chains,
                                    options.prior_mean(),
                                    MeansOf(work[i].prior_means)));
  }
  check_draws(work, proposed);
  if (chains == 1) {
    double total = 0;
    for (const at::Tensor& ratio : ratios) total += ratio.item<double>();
    // That is (g' - g)(lr (g + g') + ...) over all elements: one that is not
    // finite makes it so.
    if (!std::isfinite(total)) {
      check_finite(work);
      check_finite(proposed);
    }
    const NoiseStream stream{static_cast<uint64_t>(seed()),
                             static_cast<uint64_t>(work[0].step.host),
                             static_cast<uint32_t>(Purpose::kIndexChain)};
    const bool accepts = IndexChainAccepts(
        total, stream, /*chain=*/0, static_cast<uint64_t>(proposal));
    if (accepts) {
      for (size_t i = 0; i < work.size(); ++i) {
        work[i].grads = std::move(proposed[i].grads);
      }
    }
    return {accepts ? 1 : 0};
  }
  at::Tensor total = ratios[0];
  for (size_t i = 1; i < ratios.size(); ++i) {
    total = total + ratios[i].to(total.device());
  }
  const at::Tensor mask =
      metropolis_decide(total,
                        proposal,
                        static_cast<int64_t>(Purpose::kIndexChain),
                        seed(),
                        work[0].step.host);
  for (size_t i = 0; i < work.size(); ++i) {
    select_chains_(
        work[i].grads, proposed[i].grads, mask.to(work[i].params[0].device()));
  }
  return {0, mask.sum()};
}

// Throws if it is plain that the closure does not draw minibatches.
void EWSG::check_draws(const std::vector<Work>& current,
                       const std::vector<Work>& proposed) {
  if (!num_equal_) return;
  bool equal = true;
  bool zero = true;
  for (size_t i = 0; i < current.size(); ++i) {
    for (size_t j = 0; equal && j < current[i].grads.size(); ++j) {
      const at::Tensor& grad = proposed[i].grads[j];
      equal = at::equal(current[i].grads[j], grad);
      zero = zero && equal && !grad.any().item<bool>();
    }
  }
  num_equal_ = EqualRunning(
      num_equal_, equal, zero, /*hint=*/"", "index_chain_length(0)");
}

void EWSG::prepare(Work& work) {
  if (OptionsOfWork<EWSGOptions>(work).momentum() > 0) {
    Sampler::prepare(work);
  } else {
    start_masters(work);
  }
  work.state.resize(2);  // the momenta, and no variances
}

void EWSG::update(const Work& work) {
  if (!work.state[0].empty()) {
    return update_by(method(), work);
  }
  update_by("sgld_step_", work);
  // What a schedule of the momentum left behind.
  for (const at::Tensor& param : work.params) {
    const auto found = state_.find(param.unsafeGetTensorImpl());
    if (found == state_.end()) continue;
    own_state_of(param)["momentum"] = at::Tensor();
    if (state_of(param).is_empty()) state_.erase(found);
  }
}

}  // namespace torch_sgmcmc
