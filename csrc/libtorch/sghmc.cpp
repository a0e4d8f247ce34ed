#include "torch_sgmcmc/sghmc.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "host/online_variance.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kFriction = "1 - momentum";

// "online", the one word that there is, and no number.
bool IsOnline(const SGHMCOptions& options) {
  return std::isnan(options.number_or("noise_estimate", 0));
}

}  // namespace

void SGHMCOptions::check_values() const {
  OptionsOf::check_values();
  if (IsOnline(*this) && capturable()) {
    Invalid(
        "Invalid noise_estimate: 'online' is checked on the host at every step "
        "and excludes capturable");
  }
  check_noise_estimate(1 - momentum(), kFriction);
}

std::vector<std::string> SGHMC::state_keys() const {
  return {"momentum", "grad_variance", "previous_grad", "num_grads", "master"};
}

void SGHMC::check_saved_state(const SamplerParamState& state,
                              int64_t index) const {
  const auto lacks = [&](const std::string& what) {
    Invalid("Invalid state_dict: the state of parameter " +
            std::to_string(index) + " lacks " + what);
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

Start SGHMC::start_of_momenta(const SamplerOptions& options) const {
  const auto how = options.get<std::string>("initial_momentum");
  return how == "zeros" ? Start::kZeros : Start::kStationary;
}

void SGHMC::prepare(Work& work) {
  std::vector<at::Tensor*> momenta;
  momenta.reserve(work.params.size());
  for (const at::Tensor& param : work.params) {
    momenta.push_back(&own_state_of(param)["momentum"]);
  }
  const auto& options = OptionsOfWork<SGHMCOptions>(work);
  StartState(work, momenta, start_of_momenta(options));
  work.state.resize(2);
  work.state[0].reserve(momenta.size());
  for (const at::Tensor* momentum : momenta) {
    work.state[0].push_back(*momentum);
  }
  if (IsOnline(options)) observe_gradients(work);
  start_masters(work);
}

void SGHMC::prepare_all(std::vector<Work>& work) {
  // An estimate takes gradients in before the update.
  if (std::ranges::any_of(work, [](const Work& lists) {
        return IsOnline(OptionsOfWork<SGHMCOptions>(lists));
      })) {
    check_fit(work);
  }
  Sampler::prepare_all(work);
}

// Not with a noise estimate that is checked on the host at every step.
bool SGHMC::looks_later(const std::vector<Work>& work) const {
  return Sampler::looks_later(work) &&
         std::none_of(work.begin(), work.end(), [](const Work& lists) {
           return IsOnline(OptionsOfWork<SGHMCOptions>(lists));
         });
}

// Updates the gradients' variances and checks them against the friction; the
// update uses them once all rest on enough gradients.
void SGHMC::observe_gradients(Work& work) {
  struct Lists {
    std::vector<at::Tensor> grads;
    std::vector<at::Tensor> variances;
    std::vector<at::Tensor> previous;
  };
  std::map<int64_t, Lists> by_count;
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < work.params.size(); ++i) {
    SamplerParamState& state = own_state_of(work.params[i]);
    const int64_t count = state.num_grads.value_or(0);
    if (count == 0) {
      state["grad_variance"] = ZeroState(work.params[i]);
      state["previous_grad"] = ZeroState(work.params[i]).copy_(work.grads[i]);
    } else {
      Lists& lists = by_count[count];
      lists.grads.push_back(work.grads[i]);
      lists.variances.push_back(state["grad_variance"]);
      lists.previous.push_back(state["previous_grad"]);
    }
    state.num_grads = count + 1;
    fewest = std::min(fewest, count + 1);
  }
  for (const auto& [count, lists] : by_count) {
    gradient_variance_(lists.grads,
                       lists.variances,
                       lists.previous,
                       std::max(1.0 / static_cast<double>(count), kForgetting));
  }
  if (fewest <= kMinGradients) return;

  for (const at::Tensor& param : work.params) {
    work.state[1].push_back(state_of(param)["grad_variance"]);
  }
  check_variances(work);
}

// Compares the gradients' variances with the friction.
void SGHMC::check_variances(const Work& work) {
  double largest = 0;
  bool first = true;
  for (const at::Tensor& variance : work.state[1]) {
    if (variance.numel() == 0) continue;
    const auto value = variance.max().item<double>();
    if (first || value > largest) largest = value;
    first = false;
  }
  const auto& options = OptionsOfWork<SGHMCOptions>(work);
  const double scale =
      options.lr() * options.num_data() / (2 * options.temperature());
  CheckFriction(scale * largest,
                1 - options.momentum(),
                kFriction,
                " in the noisiest coordinate. No parameter has changed; the "
                "gradients have entered the estimate");
}

}  // namespace torch_sgmcmc
