#include "torch_sgmcmc/sghmc.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "host/online_variance.h"
#include "libtorch/core/by_coordinate.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/diagonal.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/noise_key.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/prior.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

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

// "online", the one word that there is.
bool IsOnline(const SGHMCOptions& options) {
  return std::holds_alternative<std::string>(options.noise_estimate());
}

SGHMCParamState& StateOf(SamplerParamState& state) {
  return static_cast<SGHMCParamState&>(state);
}

}  // namespace

void SGHMCOptions::check() const {
  const auto* word = std::get_if<std::string>(&noise_estimate());
  if (word != nullptr && *word != "online") {  // the table has Python's words
    Invalid("Invalid noise_estimate: " + Shown(*word) +
            " (must be a number or 'online')");
  }
  OptionsOf::check();
  std::string estimate;
  if (word != nullptr) {
    estimate = Shown(*word);
    if (capturable()) {
      Invalid("Invalid noise_estimate: " + estimate +
              " is checked on the host at every step and excludes capturable");
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
  if (present > 0 && !missing.empty()) {
    Invalid("Invalid state_dict: the state of parameter " +
            std::to_string(index) + " lacks " + missing);
  }
  if (given_mass.defined()) CheckSavedDiagonal("given_mass", index, given_mass);
  if (!given_friction.defined()) return;
  CheckSavedDiagonal("given_friction", index, given_friction);
  if (!given_mass.defined()) {
    Invalid("Invalid state_dict: the state of parameter " +
            std::to_string(index) + " lacks given_mass");
  }
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
  for (const size_t i : StartMomenta(
           work, momenta, options.initial_momentum() == "stationary")) {
    const at::Tensor& mass = StateOf(state_of(work.params[i])).given_mass;
    if (mass.defined()) momenta[i]->div_(mass.sqrt());
  }
  work.state.resize(2);
  work.state[0].reserve(momenta.size());
  for (const at::Tensor* momentum : momenta) {
    work.state[0].push_back(*momentum);
  }
  if (IsOnline(options)) observe_gradients(work);
  start_masters(work);
}

void SGHMC::prepare_all(std::vector<Work>& work) {
  if (has_masses()) {
    for (const Work& lists : work) {
      check_rates(lists, {}, ". No parameter has changed");
    }
  }
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

// Not in a step, which may not read tensors where it is captured.
void SGHMC::note_masses() {
  limits_.clear();
  for (const auto& [key, kept] : state_) {
    const auto& state = static_cast<const SGHMCParamState&>(*kept);
    if (!state.given_mass.defined()) continue;
    const RateLimits made = LimitsOf({state.given_mass, state.given_friction});
    limits_[key] = {made.most_friction, made.most_share};
  }
}

std::vector<MassAndFriction> SGHMC::masses_of(const Work& work) {
  std::vector<MassAndFriction> given;
  given.reserve(work.params.size());
  for (const at::Tensor& param : work.params) {
    const SGHMCParamState& state = StateOf(state_of(param));
    given.push_back({state.given_mass, state.given_friction});
  }
  return given;
}

void SGHMC::check_rates(const Work& work,
                        const std::vector<at::Tensor>& variances,
                        const char* state_of_things) {
  const std::vector<MassAndFriction> given = masses_of(work);
  std::vector<RateLimits> limits;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto found = limits_.find(work.params[i].unsafeGetTensorImpl());
    if (found == limits_.end()) {
      limits.emplace_back();
    } else {
      limits.push_back({found->second.first, found->second.second});
    }
  }
  CheckRates(OptionsOfWork<SGHMCOptions>(work),
             given,
             limits,
             variances,
             state_of_things);
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

  for (const at::Tensor& param : work.params) {
    work.state[1].push_back(StateOf(state_of(param)).grad_variance);
  }
  check_variances(work);
}

// Compares the gradients' variances with the friction.
void SGHMC::check_variances(const Work& work) {
  constexpr const char* kState =
      ". No parameter has changed; the gradients have entered the estimate";
  if (has_masses()) return check_rates(work, work.state[1], kState);
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
                options.momentum(),
                std::string(" in the noisiest coordinate") + kState);
}

// ---- Mass and friction ------------------------------------------------------

void SGHMC::set_mass(const std::vector<at::Tensor>& mass,
                     const std::vector<at::Tensor>& friction) {
  const std::vector<at::Tensor> params = all_params();
  const std::vector<at::Tensor> masses = Diagonals("mass", mass, params);
  std::vector<at::Tensor> frictions(params.size());
  if (!friction.empty()) frictions = Diagonals("friction", friction, params);
  for (size_t i = 0; i < params.size(); ++i) {
    replace_mass(StateOf(state_of(params[i])), masses[i], frictions[i]);
  }
  note_masses();
}

void SGHMC::set_mass(std::nullopt_t /*none*/) {
  for (const at::Tensor& param : all_params()) {
    const auto found = state_.find(param.unsafeGetTensorImpl());
    if (found == state_.end()) continue;
    auto& state = static_cast<SGHMCParamState&>(*found->second);
    replace_mass(state, {}, {});
    if (state.to_dict().entries().empty()) state_.erase(found);
  }
  note_masses();
}

void SGHMC::parameters_changed() { note_masses(); }

// Momenta are scaled, so that their law is that of the new mass.
void SGHMC::replace_mass(SGHMCParamState& state,
                         const at::Tensor& mass,
                         const at::Tensor& friction) {
  if (state.momentum.defined()) {
    if (state.given_mass.defined()) {
      state.momentum = state.momentum * state.given_mass.sqrt();
    }
    if (mass.defined()) state.momentum = state.momentum / mass.sqrt();
  }
  state.given_mass = mass;
  state.given_friction = friction;
}

void SGHMC::update(const Work& work) {
  const auto& options = OptionsOfWork<SGHMCOptions>(work);
  const NoiseKey key = KeyOf(work);
  const auto of_group = [&](const auto& step, const auto&... lists) {
    step(work.params,
         work.grads,
         work.state[0],
         work.state[1],
         lists...,
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
  };
  if (!has_masses()) return of_group(sghmc_step_);
  const auto [masses, frictions] =
      MassesAndFrictions(work.params, masses_of(work));
  of_group(sghmc_by_coordinate_step_, masses, frictions);
}

}  // namespace torch_sgmcmc
