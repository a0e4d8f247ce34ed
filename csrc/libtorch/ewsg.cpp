#include "torch_sgmcmc/ewsg.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "host/index_chain.h"
#include "host/settings.h"
#include "libtorch/checks.h"
#include "libtorch/operators.h"
#include "libtorch/sampler_impl.h"
#include "random/counter.h"

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

// The operator's number of a surrogate.
int64_t IndexOf(const std::string& surrogate) {
  const auto rows = SettingsOf(EWSGOptions::kSampler);
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

torch::Tensor FreshGradients(std::vector<ParamGroup>& groups,
                             const LossClosure& closure) {
  for (auto& group : groups) {
    for (at::Tensor& param : group.params()) param.mutable_grad().reset();
  }
  const at::AutoGradMode enable_grad(true);
  return closure();
}

// Throws unless both have gradients of the same parameters, in other memory.
void CheckComparable(const std::vector<TensorLists>& current,
                     const std::vector<TensorLists>& proposed) {
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.is_same(b);
  };
  const bool are_same = std::ranges::equal(
      current, proposed, [&](const TensorLists& a, const TensorLists& b) {
        return std::ranges::equal(a.params, b.params, is_same);
      });
  if (!are_same) {
    Raise(
        "EWSG got gradients of other parameters from the closure than at its "
        "first call in this step: minibatches could not be compared");
  }
  for (size_t i = 0; i < current.size(); ++i) {
    for (size_t j = 0; j < current[i].grads.size(); ++j) {
      const at::Tensor& fresh = proposed[i].grads[j];
      if (fresh.numel() > 0 &&
          fresh.const_data_ptr() == current[i].grads[j].const_data_ptr()) {
        Raise(
            "EWSG got the gradients of a minibatch in the memory of the "
            "previous minibatch's, which it still needs: the closure must not "
            "reuse gradients");
      }
    }
  }
}

class EWSGImpl : public SamplerImpl {
 public:
  EWSGImpl() : SamplerImpl("sghmc_step_") {
    progress_.keep<int64_t>("num_proposals", 0);
    // A tensor on the device for several chains.
    progress_.keep("num_accepted", Count());
    // The number of minibatches drawn; `minibatches` is Python's.
    progress_.keep<int64_t>("num_drawn", 0);
    progress_.keep("minibatches", std::vector<int64_t>());
  }

  torch::Tensor step(const LossClosure& closure) override;
  double acceptance_rate() const {
    return Ratio(
        static_cast<double>(progress_.get<Count>("num_accepted").get()),
        progress_.get<double>("num_proposals"));
  }

 protected:
  void prepare(TensorLists& lists) override;
  void update(const TensorLists& lists) override;
  const char* op_of(const OptionValues& options) const override {
    return options.number("momentum") > 0 ? op_ : "sgld_step_";
  }
  void check_options(const OptionValues& options) const override {
    CheckNotCapturable(options);
  }
  void check_progress(const NamedValues& progress,
                      const OptionValues& options) const override;
  std::vector<std::string> shared_names() const override {
    return {"index_chain_length", "persistent_index_chain", "num_chains"};
  }
  const char* why_equal() const override {
    return "there is one decision for all";
  }
  // Chains share a stream.
  int64_t chains_with_seeds(const OptionValues& /*options*/) const override {
    return 0;
  }
  // Minibatches are compared on the host.
  bool is_check_deferred(
      const std::vector<TensorLists>& /*lists*/) const override {
    return false;
  }

 private:
  using KeptStates = std::vector<
      std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>;

  KeptStates kept_states(const std::vector<TensorLists>& lists) const;
  void restore(KeptStates& kept);
  Count propose(const LossClosure& closure, std::vector<TensorLists>& lists,
                int64_t proposal);
  void check_draws(const std::vector<TensorLists>& current,
                   const std::vector<TensorLists>& proposed);
  int64_t num_chains() const { return options_of(0).chains().value_or(1); }

  // Number of nonzero proposals in a row with the previous minibatch's
  // gradient; none after another gradient.
  std::optional<int64_t> num_equal_ = 0;
  // The number of minibatches drawn, including this step's.
  int64_t num_drawn_ = 0;
};

void EWSGImpl::check_progress(const NamedValues& progress,
                              const OptionValues& options) const {
  CheckPart("num_accepted", progress.get<Count>("num_accepted").get(),
            "num_proposals", progress.get<int64_t>("num_proposals"));
  const auto drawn = progress.get<int64_t>("num_drawn");
  CheckCount("num_drawn", drawn);
  const auto numbers = progress.get<std::vector<int64_t>>("minibatches");
  const auto expected = static_cast<size_t>(options.chains().value_or(1));
  const bool are_drawn = std::ranges::all_of(
      numbers, [&](int64_t number) { return number >= 0 && number < drawn; });
  if (are_drawn && (numbers.empty() || numbers.size() == expected)) return;
  Invalid("Invalid minibatches: ", numbers.size(), " numbers (must be ",
          expected, " in [0, num_drawn = ", drawn, "), or none)");
}

torch::Tensor EWSGImpl::step(const LossClosure& closure) {
  if (closure == nullptr) Invalid(kEWSGNeedsClosure);
  begin_step();
  const at::NoGradGuard no_grad;
  check_groups();
  nonfinite();  // throws unless it is equal in all groups
  const auto length = options_of(0).get<int64_t>("index_chain_length");
  const int64_t chains = num_chains();
  num_drawn_ = progress_.get<int64_t>("num_drawn") + chains;

  torch::Tensor loss = FreshGradients(groups(), closure);
  if (rests()) return loss;
  std::vector<TensorLists> lists = gather();
  if (lists.empty()) {
    Raise("EWSG got no gradients from the closure (does it call backward()?)");
  }
  KeptStates before = kept_states(lists);
  Count accepted;
  try {
    // Otherwise the log ratio shows it.
    if (length == 0 || chains > 1) check_finite(lists);
    prepare_all(lists);
    for (int64_t proposal = 0; proposal < length; ++proposal) {
      accepted = Sum(accepted, propose(closure, lists, proposal));
    }
  } catch (const StepSkipped&) {
    restore(before);
    skip_step();
    progress_.put("num_drawn", num_drawn_);
    return loss;
  } catch (...) {
    restore(before);
    throw;
  }
  for (const TensorLists& each : lists) {
    for (size_t i = 0; i < each.params.size(); ++i) {
      each.params[i].mutable_grad() = each.grads[i];
    }
  }
  advance(lists);

  const int64_t proposals =
      progress_.get<int64_t>("num_proposals") + length * chains;
  accepted = Sum(progress_.get<Count>("num_accepted"), accepted);
  progress_.put("num_proposals", proposals);
  progress_.put("num_accepted", ToValue(accepted));
  progress_.put("num_drawn", num_drawn_);
  return loss;
}

// Copies of the parameters' state; null where there is none.
EWSGImpl::KeptStates EWSGImpl::kept_states(
    const std::vector<TensorLists>& lists) const {
  KeptStates kept;
  for (const TensorLists& each : lists) {
    for (const at::Tensor& param : each.params) {
      void* key = param.unsafeGetTensorImpl();
      const auto found = states().find(key);
      kept.emplace_back(
          key, found == states().end() ? nullptr : found->second->clone());
    }
  }
  return kept;
}

void EWSGImpl::restore(KeptStates& kept) {
  for (auto& [key, state] : kept) {
    if (state == nullptr) {
      states().erase(key);
    } else {
      states()[key] = std::move(state);
    }
  }
}

// Makes a step of the index chain: `lists` gets the current gradients. Returns
// the number of chains that accepted, as a tensor if the host would wait.
Count EWSGImpl::propose(const LossClosure& closure,
                        std::vector<TensorLists>& lists, int64_t proposal) {
  num_drawn_ += num_chains();
  FreshGradients(groups(), closure);
  std::vector<TensorLists> proposed = gather();
  CheckComparable(lists, proposed);
  const int64_t chains = num_chains();
  if (chains > 1) check_finite(proposed);
  Tensors ratios;
  for (size_t i = 0; i < lists.size(); ++i) {
    const OptionValues& options = *lists[i].options;
    ratios.push_back(ewsg_log_ratio(
        lists[i].params, lists[i].grads, proposed[i].grads, lists[i].state[0],
        options.lr(), options.number("momentum"), options.num_data(),
        options.prior_precision(), options.temperature(),
        lists[i].momentum_scale, IndexOf(options.get<std::string>("surrogate")),
        chains, options.prior_mean(), MeansOf(lists[i].prior_means)));
  }
  check_draws(lists, proposed);
  if (chains == 1) {
    double total = 0;
    for (const at::Tensor& ratio : ratios) total += ratio.item<double>();
    // A gradient that is not finite makes the ratio so.
    if (!std::isfinite(total)) {
      check_finite(lists);
      check_finite(proposed);
    }
    const NoiseStream stream =
        KeyedStream(seed(), static_cast<uint64_t>(lists[0].step.host),
                    Purpose::kIndexChain);
    const bool accepts = IndexChainAccepts(total, stream, /*chain=*/0,
                                           static_cast<uint64_t>(proposal));
    if (accepts) {
      for (size_t i = 0; i < lists.size(); ++i) {
        lists[i].grads = std::move(proposed[i].grads);
      }
    }
    return {accepts ? 1 : 0};
  }
  at::Tensor total = ratios[0];
  for (size_t i = 1; i < ratios.size(); ++i) {
    total = total + ratios[i].to(total.device());
  }
  const at::Tensor mask = metropolis_decide(
      total, proposal, static_cast<int64_t>(Purpose::kIndexChain), seed(),
      lists[0].step.host);
  for (size_t i = 0; i < lists.size(); ++i) {
    select_chains_(lists[i].grads, proposed[i].grads,
                   mask.to(lists[i].params[0].device()));
  }
  return {0, mask.sum()};
}

// Throws if the closure obviously does not draw minibatches.
void EWSGImpl::check_draws(const std::vector<TensorLists>& current,
                           const std::vector<TensorLists>& proposed) {
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
  num_equal_ = EqualRunning(num_equal_, equal, zero, /*hint=*/"",
                            "index_chain_length(0)");
}

void EWSGImpl::prepare(TensorLists& lists) {
  if (lists.options->number("momentum") > 0) SamplerImpl::prepare(lists);
  lists.state.resize(2);  // the momenta, and no variances
}

void EWSGImpl::update(const TensorLists& lists) {
  if (!lists.state[0].empty()) {
    return update_by(op_, lists);
  }
  update_by(op_of(*lists.options), lists);
  // Momenta from before a schedule set momentum to 0.
  for (const at::Tensor& param : lists.params) {
    const auto found = states().find(param.unsafeGetTensorImpl());
    if (found == states().end()) continue;
    own_state_of(param)["momentum"] = at::Tensor();
    const auto& left = state_of(param).tensors();
    if (std::ranges::none_of(
            left, [](const auto& kept) { return kept.second.defined(); })) {
      states().erase(found);
    }
  }
}

const bool kEWSG = Register<EWSGOptions, EWSGImpl>();

}  // namespace

double EWSG::acceptance_rate() const {
  return static_cast<const EWSGImpl&>(impl()).acceptance_rate();
}

}  // namespace torch_sgmcmc
