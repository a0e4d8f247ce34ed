#include "torch_sgmcmc/sghmc.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "libtorch/core/checks.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/noise_key.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/prior.h"

namespace torch_sgmcmc {
namespace {

// As in torch_sgmcmc/sghmc.py, which says why.
constexpr double kForgetting = 1e-3;
constexpr int64_t kMinGradients = 100;

std::string SixDigits(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.6g", value);
  return text.data();
}

void CheckFriction(double noise_estimate,
                   double momentum,
                   const std::string& where = "") {
  const double friction = 1.0 - momentum;
  // momentum 0.9 and noise_estimate 0.1 are equal parts of 1, but for rounding.
  if (noise_estimate > friction + 1e-12) {
    Invalid(
        "Invalid noise_estimate: " + SixDigits(noise_estimate) + where +
        " (must not exceed the friction 1 - momentum = " + SixDigits(friction) +
        ": lower momentum or lr, or take larger minibatches)");
  }
}

bool IsOnline(const SGHMCOptions& options) {
  return std::holds_alternative<std::string>(options.noise_estimate());
}

SGHMCParamState& StateOf(SamplerParamState& state) {
  return static_cast<SGHMCParamState&>(state);
}

}  // namespace

void SGHMCOptions::check() const {
  OptionsOf::check();
  std::string estimate;
  if (const auto* word = std::get_if<std::string>(&noise_estimate())) {
    estimate = Shown(*word);
    if (capturable()) {
      Invalid(
          "Invalid noise_estimate: 'online' is checked on the host at every "
          "step and excludes capturable");
    }
  } else {
    const double number = std::get<double>(noise_estimate());
    if (number == 0) return;
    CheckFriction(number, momentum());
    estimate = Shown(number);
  }
  if (temperature() == 0) {
    Invalid("Invalid noise_estimate: " + estimate +
            " (must be 0 at temperature 0, where no noise is injected)");
  }
}

void SGHMCParamState::from_dict(const StateDict& dict,
                                const at::Tensor& param,
                                int64_t index) {
  ParamStateOf::from_dict(dict, param, index);
  std::string missing;
  int present = 0;
  for (const char* key : {"grad_variance", "num_grads", "previous_grad"}) {
    if (dict.contains(key)) {
      ++present;
    } else {
      missing += (missing.empty() ? "" : ", ") + std::string(key);
    }
  }
  if (present == 0 || missing.empty()) return;
  Invalid("Invalid state_dict: the state of parameter " +
          std::to_string(index) + " lacks " + missing);
}

std::unique_ptr<SamplerParamState> SGHMC::new_state() const {
  return std::make_unique<SGHMCParamState>();
}

void SGHMC::prepare(Work& work) {
  std::vector<at::Tensor*> momenta;
  momenta.reserve(work.params.size());
  for (const at::Tensor& param : work.params) {
    momenta.push_back(&StateOf(state_of(param)).momentum);
  }
  const auto& options = OptionsOfWork<SGHMCOptions>(work);
  StartMomenta(work, momenta, options.initial_momentum() == "stationary");
  work.state.resize(2);
  work.state[0].reserve(momenta.size());
  for (const at::Tensor* momentum : momenta) {
    work.state[0].push_back(*momentum);
  }
  if (IsOnline(options)) observe_gradients(work);
  start_masters(work);
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
    SGHMCParamState& state = StateOf(state_of(work.params[i]));
    if (state.num_grads == 0) {
      state.grad_variance = ZeroState(work.params[i]);
      state.previous_grad = ZeroState(work.params[i]).copy_(work.grads[i]);
    } else {
      Lists& lists = by_count[state.num_grads];
      lists.grads.push_back(work.grads[i]);
      lists.variances.push_back(state.grad_variance);
      lists.previous.push_back(state.previous_grad);
    }
    ++state.num_grads;
    fewest = std::min(fewest, state.num_grads);
  }
  for (const auto& [count, lists] : by_count) {
    gradient_variance_(lists.grads,
                       lists.variances,
                       lists.previous,
                       std::max(1.0 / static_cast<double>(count), kForgetting));
  }
  if (fewest <= kMinGradients) return;

  double largest = 0;
  bool first = true;
  for (const at::Tensor& param : work.params) {
    const SGHMCParamState& state = StateOf(state_of(param));
    work.state[1].push_back(state.grad_variance);
    if (state.grad_variance.numel() == 0) continue;
    const auto value = state.grad_variance.max().item<double>();
    if (first || value > largest) largest = value;
    first = false;
  }
  const auto& options = OptionsOfWork<SGHMCOptions>(work);
  const double scale =
      options.lr() * options.num_data() / (2 * options.temperature());
  CheckFriction(scale * largest,
                options.momentum(),
                " in the noisiest coordinate. No parameter has changed; the "
                "gradients have entered the estimate");
}

void SGHMC::update(const Work& work) {
  const auto& options = OptionsOfWork<SGHMCOptions>(work);
  const NoiseKey key = KeyOf(work);
  sghmc_step_(
      work.params,
      work.grads,
      work.state[0],
      work.state[1],
      work.masters,
      options.lr(),
      options.momentum(),
      options.num_data(),
      options.prior_precision(),
      options.temperature(),
      IsOnline(options) ? 0.0 : std::get<double>(options.noise_estimate()),
      options.resample_momentum_every(),
      key.offsets,
      key.seed,
      key.step,
      key.device_step,
      options.prior_mean(),
      MeansOf(work.prior_means),
      /*rows=*/std::nullopt,
      key.num_chains);
}

}  // namespace torch_sgmcmc
