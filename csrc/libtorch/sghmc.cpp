#include "torch_sgmcmc/sghmc.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/settings.h"
#include "libtorch/checks.h"
#include "libtorch/operators.h"
#include "libtorch/sampler_impl.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kFriction = "1 - momentum";

bool IsOnline(const OptionValues& options) {
  return std::isnan(options.number_or("noise_estimate", 0));
}

// Compares the gradients' variances with the friction.
void CheckVariances(const TensorLists& lists) {
  double largest = 0;
  bool first = true;
  for (const at::Tensor& variance : lists.state[1]) {
    if (variance.numel() == 0) continue;
    const auto value = variance.max().item<double>();
    if (first || value > largest) largest = value;
    first = false;
  }
  const OptionValues& options = *lists.options;
  const double scale =
      options.lr() * options.num_data() / (2 * options.temperature());
  try {
    CheckFriction(scale * largest, 1 - options.number("momentum"), kFriction,
                  " in the noisiest coordinate. No parameter has changed; the "
                  "gradients have entered the estimate");
  } catch (const std::invalid_argument& error) {
    Raise(error.what());  // a step has found it
  }
}

class SGHMCImpl : public SamplerImpl {
 public:
  SGHMCImpl() : SamplerImpl("sghmc_step_") {}

 protected:
  void prepare(TensorLists& lists) override;
  void prepare_all(std::vector<TensorLists>& lists) override;
  bool is_check_deferred(const std::vector<TensorLists>& lists) const override;
  Start start_of_momenta(const OptionValues& options) const override;
  std::vector<std::string> state_keys() const override;
  void check_options(const OptionValues& options) const override;
  void check_saved_state(const SamplerParamState& state,
                         int64_t index) const override;

 private:
  void observe_gradients(TensorLists& lists);
};

void SGHMCImpl::check_options(const OptionValues& options) const {
  if (IsOnline(options) && options.is_capturable()) {
    Invalid(
        "Invalid noise_estimate: 'online' is checked on the host at every step "
        "and excludes capturable");
  }
  options.check_noise_estimate(1 - options.number("momentum"), kFriction);
}

std::vector<std::string> SGHMCImpl::state_keys() const {
  return {"momentum", "grad_variance", "previous_grad", "num_grads", "master"};
}

void SGHMCImpl::check_saved_state(const SamplerParamState& state,
                                  int64_t index) const {
  std::vector<std::string> missing;
  for (const auto& [key, is_there] :
       {std::pair("grad_variance", state["grad_variance"].defined()),
        std::pair("num_grads", state.num_grads.has_value()),
        std::pair("previous_grad", state["previous_grad"].defined())}) {
    if (!is_there) missing.emplace_back(key);
  }
  if (missing.empty() || missing.size() == 3) return;
  Invalid("Invalid state_dict: the state of parameter ", index, " lacks ",
          Enumerated(missing));
}

Start SGHMCImpl::start_of_momenta(const OptionValues& options) const {
  const auto how = options.get<std::string>("initial_momentum");
  return how == "zeros" ? Start::kZeros : Start::kStationary;
}

void SGHMCImpl::prepare(TensorLists& lists) {
  SamplerImpl::prepare(lists);
  lists.state.resize(2);
  if (IsOnline(*lists.options)) observe_gradients(lists);
}

void SGHMCImpl::prepare_all(std::vector<TensorLists>& lists) {
  // The estimate changes before the update.
  if (std::ranges::any_of(lists, [](const TensorLists& each) {
        return IsOnline(*each.options);
      })) {
    check_fit(lists);
  }
  SamplerImpl::prepare_all(lists);
}

// The online noise estimate is checked on the host at every step.
bool SGHMCImpl::is_check_deferred(const std::vector<TensorLists>& lists) const {
  return SamplerImpl::is_check_deferred(lists) &&
         std::none_of(lists.begin(), lists.end(), [](const TensorLists& each) {
           return IsOnline(*each.options);
         });
}

// Updates the gradients' variances. With enough gradients the update uses them,
// and they must not exceed the friction.
void SGHMCImpl::observe_gradients(TensorLists& lists) {
  struct Gradients {
    Tensors grads;
    Tensors variances;
    Tensors previous;
  };
  std::map<int64_t, Gradients> by_count;
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < lists.params.size(); ++i) {
    SamplerParamState& state = own_state_of(lists.params[i]);
    const int64_t count = state.num_grads.value_or(0);
    if (count == 0) {
      state["grad_variance"] = ZeroState(lists.params[i]);
      state["previous_grad"] = ZeroState(lists.params[i]).copy_(lists.grads[i]);
    } else {
      Gradients& of_count = by_count[count];
      of_count.grads.push_back(lists.grads[i]);
      of_count.variances.push_back(state["grad_variance"]);
      of_count.previous.push_back(state["previous_grad"]);
    }
    state.num_grads = count + 1;
    fewest = std::min(fewest, count + 1);
  }
  for (const auto& [count, of_count] : by_count) {
    gradient_variance_(
        of_count.grads, of_count.variances, of_count.previous,
        std::max(1.0 / static_cast<double>(count), kVarianceDecay));
  }
  if (fewest <= kMinGradients) return;

  for (const at::Tensor& param : lists.params) {
    lists.state[1].push_back(state_of(param)["grad_variance"]);
  }
  CheckVariances(lists);
}

const bool kSGHMC = Register<SGHMCOptions, SGHMCImpl>();

}  // namespace
}  // namespace torch_sgmcmc
