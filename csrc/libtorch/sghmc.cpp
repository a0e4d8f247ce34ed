#include "torch_sgmcmc/sghmc.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/counter.h"
#include "libtorch/core/by_coordinate.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/correlated_noise.h"
#include "libtorch/core/diagonal.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/noise_key.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/prior.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

// As in torch_sgmcmc/sghmc.py, which says why.
constexpr double kForgetting = 1e-3;
constexpr int64_t kMinGradients = 100;

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

// Of everything that is not a number.
bool IsWord(const SGHMCOptions& options) {
  return std::holds_alternative<std::string>(options.noise_estimate());
}

bool IsOnline(const SGHMCOptions& options) {
  return IsWord(options) &&
         std::get<std::string>(options.noise_estimate()) == "online";
}

// Standard normals for the parameters of a list.
std::vector<at::Tensor> White(const Work& work, Purpose purpose) {
  std::vector<at::Tensor> out;
  out.reserve(work.params.size());
  for (const at::Tensor& param : work.params) out.push_back(ZeroState(param));
  const NoiseKey key = KeyOf(work);
  gaussian_(out,
            /*std=*/1.0,
            key.offsets,
            key.seed,
            key.step,
            static_cast<int64_t>(purpose),
            key.device_step,
            /*rows=*/std::nullopt,
            key.num_chains);
  return out;
}

int64_t NumelOf(const std::vector<at::Tensor>& params) {
  int64_t size = 0;
  for (const at::Tensor& param : params) size += param.numel();
  return size;
}

c10::Device DeviceOf(const std::vector<at::Tensor>& params) {
  return params.empty() ? at::kCPU : params[0].device();
}

SGHMCParamState& StateOf(SamplerParamState& state) {
  return static_cast<SGHMCParamState&>(state);
}

constexpr const char* kUnchanged = ". No parameter has changed";

}  // namespace

void SGHMCOptions::check() const {
  OptionsOf::check();
  std::string estimate;
  if (const auto* word = std::get_if<std::string>(&noise_estimate())) {
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
  if (given_variance.defined()) {
    CheckSavedDiagonal("given_variance", index, given_variance, true);
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
  work.state.resize(3);
  work.state[0].reserve(momenta.size());
  for (const at::Tensor* momentum : momenta) {
    work.state[0].push_back(*momentum);
  }
  if (IsOnline(options)) {
    observe_gradients(work);
  } else if (IsWord(options) && !covariance_.defined()) {
    take_given(work);
  }
  start_masters(work);
}

void SGHMC::prepare_all(std::vector<Work>& work) {
  if (has_masses()) {
    for (const Work& lists : work) check_rates(lists, {}, kUnchanged);
  }
  // An estimate takes gradients in before the update.
  if (std::ranges::any_of(work, [](const Work& lists) {
        return IsOnline(OptionsOfWork<SGHMCOptions>(lists));
      })) {
    check_fit(work);
  }
  Sampler::prepare_all(work);
  if (covariance_.defined() && !work.empty()) draw_correlated(work);
}

// Not with a noise estimate that is checked on the host at every step.
bool SGHMC::looks_later(const std::vector<Work>& work) const {
  return Sampler::looks_later(work) &&
         std::none_of(work.begin(), work.end(), [](const Work& lists) {
           return IsWord(OptionsOfWork<SGHMCOptions>(lists));
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

void SGHMC::take_given(Work& work) {
  for (const at::Tensor& param : work.params) {
    const at::Tensor& variance = StateOf(state_of(param)).given_variance;
    if (!variance.defined()) {
      throw std::runtime_error(
          "SGHMC has no gradient variance for a parameter of shape " +
          Shape(param.sizes()) +
          ": call set_gradient_variance() before step(), with that of all "
          "parameters");
    }
    work.state[1].push_back(variance);
  }
  check_variances(work, kUnchanged);
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
  check_variances(
      work,
      ". No parameter has changed; the gradients have entered the estimate");
}

// Compares the gradients' variances with the friction.
void SGHMC::check_variances(const Work& work, const char* state_of_things) {
  if (has_masses()) return check_rates(work, work.state[1], state_of_things);
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
                std::string(" in the noisiest coordinate") + state_of_things);
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

void SGHMC::parameters_changed() {
  factors_.clear();
  note_masses();
}

// Momenta are scaled, so that their law is that of the new mass.
void SGHMC::replace_mass(SGHMCParamState& state,
                         const at::Tensor& mass,
                         const at::Tensor& friction) {
  factors_.clear();
  if (state.momentum.defined()) {
    if (state.given_mass.defined()) {
      state.momentum = state.momentum * state.given_mass.sqrt();
    }
    if (mass.defined()) state.momentum = state.momentum / mass.sqrt();
  }
  state.given_mass = mass;
  state.given_friction = friction;
}

// ---- Var(ḡ) that users give -------------------------------------------------

void SGHMC::set_gradient_variance(const std::vector<at::Tensor>& variance) {
  set_given(
      Diagonals("gradient variance", variance, all_params(), /*or_zero=*/true),
      {});
}

void SGHMC::set_gradient_variance(std::nullopt_t /*none*/) {
  set_given({}, {});
}

void SGHMC::set_gradient_covariance(const at::Tensor& covariance) {
  check_takes_matrix();
  const std::vector<at::Tensor> params = all_params();
  set_given({},
            CheckedCovariance("Invalid gradient covariance: it",
                              covariance,
                              NumelOf(params),
                              DeviceOf(params)));
}

void SGHMC::set_given(const std::vector<at::Tensor>& variances,
                      const at::Tensor& covariance) {
  covariance_ = covariance;
  factors_.clear();
  const std::vector<at::Tensor> params = all_params();
  for (size_t i = 0; i < params.size(); ++i) {
    const auto found = state_.find(params[i].unsafeGetTensorImpl());
    if (!variances.empty()) {
      StateOf(state_of(params[i])).given_variance = variances[i];
    } else if (found != state_.end()) {
      auto& state = static_cast<SGHMCParamState&>(*found->second);
      state.given_variance = at::Tensor();
      if (state.to_dict().entries().empty()) state_.erase(found);
    }
  }
}

void SGHMC::check_takes_matrix() const {
  std::set<std::string> devices;
  for (const at::Tensor& param : all_params()) {
    devices.insert(param.device().str());
  }
  const char* wrong = nullptr;
  if (first().num_chains()) {
    wrong = "num_chains";
  } else if (devices.size() > 1) {
    wrong = "parameters on several devices";
  }
  if (wrong == nullptr) return;
  Invalid(std::string("Invalid gradient covariance: a matrix excludes ") +
          wrong + " (give the variance of each coordinate)");
}

void SGHMC::write_common(StateDict& state) const {
  if (!covariance_.defined()) return;
  state.set("gradient_noise", StateDict{{"covariance", covariance_}});
}

std::vector<std::string> SGHMC::common_keys() const {
  return {"gradient_noise"};
}

std::function<void()> SGHMC::read_common(const StateDict& state) {
  at::Tensor saved;
  if (state.contains("gradient_noise")) {
    const c10::IValue kept = state.at("gradient_noise");
    const bool is_dict = kept.isGenericDict();
    const StateDict dict = is_dict ? StateDict(kept) : StateDict();
    if (dict.entries().size() != 1 || !dict.contains("covariance") ||
        !dict.at("covariance").isTensor()) {
      Invalid(
          "Invalid state_dict: gradient_noise (must be a dict of covariance, a "
          "Tensor)");
    }
    check_takes_matrix();
    const std::vector<at::Tensor> params = all_params();
    saved = CheckedCovariance("Invalid state_dict: gradient_noise",
                              dict.at("covariance").toTensor(),
                              NumelOf(params),
                              DeviceOf(params));
  }
  return [this, saved] {
    covariance_ = saved;
    factors_.clear();
    note_masses();
  };
}

// ---- Noise that is correlated -----------------------------------------------

// Fills the third list of each work's state with the noise of the step.
void SGHMC::draw_correlated(std::vector<Work>& work) {
  for (const Work& lists : work) {
    const auto& options = OptionsOfWork<SGHMCOptions>(lists);
    if (IsWord(options) && !IsOnline(options)) continue;
    Invalid("Invalid noise_estimate: " +
            std::visit([](const auto& value) { return Shown(value); },
                       options.noise_estimate()) +
            " (must be 'given' in all groups beside a matrix over all "
            "coordinates; set_gradient_variance(std::nullopt) removes it)");
  }
  const at::Tensor factor = factor_of(work);
  std::vector<at::Tensor> white;
  for (Work& lists : work) {
    lists.state[2] = White(lists, Purpose::kUpdate);
    for (const at::Tensor& noise : lists.state[2]) {
      white.push_back(noise.to(at::kDouble).flatten());
    }
  }
  const at::Tensor noise = Correlated(factor, at::cat(white));
  int64_t begin = 0;
  for (const Work& lists : work) {
    for (const at::Tensor& place : lists.state[2]) {
      place.copy_(noise.narrow(0, begin, place.numel()).view(place.sizes()));
      begin += place.numel();
    }
  }
}

// The noise's factor, of those coordinates that have a gradient.
at::Tensor SGHMC::factor_of(const std::vector<Work>& work) {
  const std::vector<at::Tensor> params = all_params();
  if (covariance_.size(0) != NumelOf(params)) {
    throw std::runtime_error("SGHMC has a gradient covariance over " +
                             std::to_string(covariance_.size(0)) +
                             " coordinates, and its parameters have " +
                             std::to_string(NumelOf(params)) +
                             ": call set_gradient_covariance() anew");
  }
  std::vector<bool> drawn;
  Factor made{{},
              {covariance_.is_inference()
                   ? 0.0
                   : static_cast<double>(covariance_._version())},
              {}};
  for (const Work& lists : work) {
    const auto& options = OptionsOfWork<SGHMCOptions>(lists);
    drawn.push_back(IsDrawn(lists));
    for (const at::Tensor& param : lists.params) {
      made.params.push_back(param.unsafeGetTensorImpl());
      for (const double number : {options.lr(),
                                  options.momentum(),
                                  options.num_data(),
                                  options.temperature()}) {
        made.numbers.push_back(number);
      }
    }
  }
  Factor& known = factors_[drawn];
  if (known.factor.defined() && known.params == made.params &&
      known.numbers == made.numbers) {
    return known.factor;
  }
  std::map<const void*, int64_t> begins;
  int64_t begin = 0;
  for (const at::Tensor& param : params) {
    begins[param.unsafeGetTensorImpl()] = begin;
    begin += param.numel();
  }
  std::vector<at::Tensor> index;
  std::vector<at::Tensor> frictions;
  std::vector<at::Tensor> scales;
  std::vector<at::Tensor> heats;
  for (const Work& lists : work) {
    const auto& options = OptionsOfWork<SGHMCOptions>(lists);
    const double heat = options.temperature() / options.num_data();
    for (const at::Tensor& param : lists.params) {
      const int64_t first = begins.at(param.unsafeGetTensorImpl());
      index.push_back(at::arange(first,
                                 first + param.numel(),
                                 covariance_.options().dtype(at::kLong)));
      const SGHMCParamState& state = StateOf(state_of(param));
      const Rates rates = RatesOf(options,
                                  param,
                                  {state.given_mass, state.given_friction},
                                  at::kDouble);
      const at::Tensor friction = rates.friction.flatten();
      const at::Tensor lr = rates.lr.flatten();
      at::Tensor scale = (lr / (2 * heat)).sqrt();
      if (IsDrawn(lists)) scale *= (2 - friction).reciprocal();
      frictions.push_back(friction);
      scales.push_back(scale);
      heats.push_back(lr * (2 * heat));
    }
  }
  const at::Tensor all = at::cat(index);
  made.factor =
      NoiseFactor(at::cat(frictions),
                  at::cat(scales),
                  covariance_.index_select(0, all).index_select(1, all));
  made.factor = at::cat(heats).sqrt().unsqueeze(1) * made.factor;
  known = std::move(made);
  return known.factor;
}

void SGHMC::update_with_noise(const Work& work) {
  const auto& options = OptionsOfWork<SGHMCOptions>(work);
  std::vector<at::Tensor> drawn(work.params.size());
  if (IsDrawn(work)) drawn = White(work, Purpose::kMomentum);
  auto master = work.masters.begin();
  for (size_t i = 0; i < work.params.size(); ++i) {
    const at::Tensor param = work.params[i].detach();
    const at::Tensor theta = HasMaster(param) ? *master++ : param;
    const SGHMCParamState& state = StateOf(state_of(work.params[i]));
    UpdateWithNoise(
        options,
        RatesOf(options,
                param,
                {state.given_mass, state.given_friction},
                theta.scalar_type()),
        {theta,
         work.prior_means.empty() ? at::Tensor() : work.prior_means[i],
         work.grads[i],
         work.state[0][i],
         work.state[2][i],
         drawn[i]});
    if (HasMaster(param)) param.copy_(theta);
  }
}

void SGHMC::update(const Work& work) {
  if (!work.state[2].empty()) return update_with_noise(work);
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
         IsWord(options) ? 0.0 : std::get<double>(options.noise_estimate()),
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
