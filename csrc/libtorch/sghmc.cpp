#include "torch_sgmcmc/sghmc.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
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
  const auto lacks = [&](const std::string& what) {
    Invalid("Invalid state_dict: the state of parameter ", index, " lacks ",
            what);
  };
  std::string missing;
  int present = 0;
  const auto look_for = [&](const char* key, bool is_there) {
    present += is_there ? 1 : 0;
    if (!is_there) missing += (missing.empty() ? "" : ", ") + std::string(key);
  };
  look_for("grad_variance", state["grad_variance"].defined());
  look_for("num_grads", state.num_grads.has_value());
  look_for("previous_grad", state["previous_grad"].defined());
  if (present > 0 && !missing.empty()) lacks(missing);
}

Start SGHMCImpl::start_of_momenta(const OptionValues& options) const {
  const auto how = options.get<std::string>("initial_momentum");
  return how == "zeros" ? Start::kZeros : Start::kStationary;
}

void SGHMCImpl::prepare(TensorLists& lists) {
  std::vector<at::Tensor*> momenta;
  momenta.reserve(lists.params.size());
  for (const at::Tensor& param : lists.params) {
    momenta.push_back(&own_state_of(param)["momentum"]);
  }
  const OptionValues& options = *lists.options;
  StartState(lists, momenta, start_of_momenta(options));
  lists.state.resize(2);
  lists.state[0].reserve(momenta.size());
  for (const at::Tensor* momentum : momenta) {
    lists.state[0].push_back(*momentum);
  }
  if (IsOnline(options)) observe_gradients(lists);
  start_masters(lists);
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
    std::vector<at::Tensor> grads;
    std::vector<at::Tensor> variances;
    std::vector<at::Tensor> previous;
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
