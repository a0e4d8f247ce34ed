#include "torch_sgmcmc/hmc.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/counter.h"
#include "host/as_begun.h"
#include "host/closure_watch.h"
#include "host/dual_averaging.h"
#include "host/leapfrog_steps.h"
#include "host/metropolis.h"
#include "host/ratio.h"
#include "host/trajectory_heat.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/diagonal.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/nonfinite.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/prior.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/step_observer.h"
#include "libtorch/core/text.h"
#include "libtorch/core/trajectory_heat.h"
#include "libtorch/core/versions.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kHMCNeedsClosure =
    "HMC::step() needs a closure, since it computes several gradients a step:\n"
    "\n"
    "    sampler.step([&] {\n"
    "      auto loss = cross_entropy(net->forward(x), y);  // of all data\n"
    "      loss.backward();\n"
    "      return loss;\n"
    "    });";

constexpr size_t kMomenta = 0;  // places in Work::state
constexpr size_t kMasses = 1;

// The chains' mean losses as a row of float64.
at::Tensor Losses(const torch::Tensor& loss,
                  const std::optional<int64_t>& chains,
                  c10::Device device) {
  if (!loss.defined()) {
    Invalid(
        "HMC got no loss from the closure, which must return it for the "
        "Metropolis test (metropolis(false) makes none)");
  }
  const std::vector<int64_t> expected =
      chains ? std::vector<int64_t>{*chains} : std::vector<int64_t>{};
  if (loss.sizes() != c10::IntArrayRef(expected)) {
    Invalid("Invalid loss: shape " + Shape(loss.sizes()) + " (must be " +
            (chains ? Shape(expected) +
                          ", the mean loss of each chain; call backward() on "
                          "its sum)"
                    : std::string("a scalar)")));
  }
  return loss.detach().to(device, at::kDouble).reshape(-1);
}

// Where the parameters are on a trajectory, for gauges.
std::vector<Moving> MovingOf(const std::vector<Work>& work) {
  std::vector<Moving> moving;
  moving.reserve(work.size());
  for (const Work& lists : work) {
    std::vector<at::Tensor> positions;
    size_t master = 0;
    for (const at::Tensor& p : lists.params) {
      positions.push_back(HasMaster(p) ? lists.masters[master++] : p.detach());
    }
    moving.push_back(
        {lists.params,
         lists.grads,
         std::move(positions),
         lists.state[kMomenta],
         lists.state[kMasses],
         lists.options->prior_precision() / lists.options->num_data(),
         lists.options->prior_mean(),
         lists.prior_means});
  }
  return moving;
}

// Those of a row of float64.
std::vector<double> Numbers(const at::Tensor& row) {
  const at::Tensor here = row.cpu().contiguous();
  const auto* numbers = here.const_data_ptr<double>();
  return {numbers, numbers + here.numel()};
}

}  // namespace

void HMCOptions::check_values() const {
  OptionsOf::check_values();
  if (num_steps().has_value() == trajectory_length().has_value()) {
    Invalid(std::string("Invalid num_steps and trajectory_length: ") +
            (num_steps() ? "both" : "neither") +
            " set (set exactly one of them)");
  }
  refuse_capturable();
}

void HMCOptions::check_progress() const {
  const auto all = get<int64_t>("num_trajectories");
  for (const char* part : {"num_accepted", "num_divergences"}) {
    CheckPart(part, get<int64_t>(part), "num_trajectories", all);
  }
  const auto adaptation = get<std::vector<double>>("dual_averaging");
  if (!adaptation.empty()) static_cast<void>(DualAveraging(adaptation));
}

std::vector<std::string> HMC::state_keys() const {
  return {"momentum", "mass", "master"};
}

void HMC::check_saved_state(const SamplerParamState& state,
                            int64_t index) const {
  if (state["mass"].defined()) CheckSavedDiagonal("mass", index, state["mass"]);
}

double HMC::acceptance_rate() const {
  return Ratio(progress().get<double>("num_accepted"),
               progress().get<double>("num_trajectories"));
}

int64_t HMC::num_divergences() const {
  return progress().get<int64_t>("num_divergences");
}

// ---- Mass -------------------------------------------------------------------

// Drops a tensor of a parameter's state, and with its last one the state.
void HMC::forget(const at::Tensor& param, const char* key) {
  const auto found = state_.find(param.unsafeGetTensorImpl());
  if (found == state_.end()) return;
  own_state_of(param)[key] = at::Tensor();
  if (state_of(param).is_empty()) state_.erase(found);
}

void HMC::set_mass(const std::vector<at::Tensor>& masses) {
  const std::vector<at::Tensor> params = all_params();
  const std::vector<at::Tensor> ready = Diagonals("masses", masses, params);
  for (size_t i = 0; i < params.size(); ++i) {
    forget(params[i], "momentum");
    own_state_of(params[i])["mass"] = ready[i];
  }
}

void HMC::set_mass(std::nullopt_t /*none*/) {
  for (const at::Tensor& param : all_params()) {
    forget(param, "momentum");
    forget(param, "mass");
  }
}

// ---- Trajectories -----------------------------------------------------------

// NOLINTNEXTLINE(google-default-arguments): as torch's own.
torch::Tensor HMC::step(LossClosure closure) {
  return simulate(closure, std::nullopt).loss;
}

void HMC::warmup(const LossClosure& closure,
                 int64_t steps,
                 double target_acceptance,
                 bool finish) {
  CheckInteger("steps", steps, 1);
  CheckReal(
      "target_acceptance", target_acceptance, {.high = 1, .low_open = true});
  begin_step();
  check_groups();
  if (!first().metropolis()) {
    Invalid(
        "Invalid metropolis: false (warmup() adapts to the acceptance rate)");
  }
  const auto saved = progress().get<std::vector<double>>("dual_averaging");
  DualAveraging adaptation =
      saved.empty() ? DualAveraging(first().step_size(), target_acceptance)
                    : DualAveraging(saved);
  CheckAsBegun("target_acceptance", target_acceptance, adaptation.target());
  for (int64_t i = 0; i < steps; ++i) {
    const at::Tensor ratios = simulate(closure, kMostWarmupSteps).log_ratios;
    if (!ratios.defined()) continue;  // left out
    adaptation.Update(MeanAcceptance(Numbers(ratios)));
    progress().put("dual_averaging", adaptation.state());
    set_step_size(adaptation.step_size());
  }
  if (!finish) return;
  set_step_size(adaptation.averaged());
  progress().take_progress(HMCOptions());
}

// Of all groups, and of those that leave it open later.
void HMC::set_step_size(double value) {
  static_cast<HMCOptions&>(*defaults_).step_size(value);
  for_each_group([&](HMCOptions& options) { options.step_size(value); });
}

// One step.
HMC::Trajectory HMC::simulate(const LossClosure& closure,
                              std::optional<int64_t> most_steps) {
  if (closure == nullptr) Invalid(kHMCNeedsClosure);
  begin_step();
  const at::NoGradGuard no_grad;
  check_groups();
  Trajectory result;
  result.loss = FreshGradients(param_groups_, closure);
  std::vector<Work> work = gather();
  if (work.empty()) {
    throw std::runtime_error(
        "HMC got no gradients from the closure (does it call backward()?)");
  }
  try {
    result.log_ratios = go_on(closure, result.loss, work, most_steps);
  } catch (const StepLeftOut&) {
    leave_out();
  }
  return result;
}

// Goes on with a step once there are gradients; returns the log ratios of the
// Metropolis test, if there is one.
at::Tensor HMC::go_on(const LossClosure& closure,
                      const torch::Tensor& loss,
                      std::vector<Work>& work,
                      std::optional<int64_t> most_steps) {
  const bool metropolis = first().metropolis();
  check_finite(work);
  prepare_all(work);
  at::Tensor start;
  at::Tensor losses;
  at::Tensor end_losses;
  std::vector<std::vector<at::Tensor>> turned(work.size());
  const auto row = [&](const torch::Tensor& of) {
    return Losses(of, first().num_chains(), work[0].params[0].device());
  };
  if (metropolis) {
    losses = row(loss);
    start = energy(losses, work);
    if (!start.isfinite().all().item<bool>()) {
      if (nonfinite() == "skip") throw StepLeftOut();
      throw std::runtime_error(
          "HMC got a loss or parameters that are not finite at the start of a "
          "trajectory");
    }
    check_same_target(losses);
  }
  std::unique_ptr<TrajectoryHeat> heat;
  if (observer() != nullptr) heat = observer()->trajectory(work);
  if (metropolis) {
    if (heat != nullptr) heat->look(MovingOf(work), {1, 0, 0});
    if (heat != nullptr || first().resample_momentum_every() != 1) {
      for (size_t i = 0; i < work.size(); ++i) {
        for (const at::Tensor& momentum : work[i].state[kMomenta]) {
          turned[i].push_back(-momentum);
        }
      }
    }
  }
  at::Tensor log_ratios;
  const std::vector<Start> saved = copies(work);
  try {
    const torch::Tensor end =
        integrate(closure, work, most_steps, metropolis ? nullptr : heat.get());
    if (metropolis) {
      end_losses = row(end);
      log_ratios = (start - energy(end_losses, work)) / first().temperature();
    }
  } catch (...) {
    for (size_t i = 0; i < work.size(); ++i) {
      for (size_t j = 0; j < saved[i].params.size(); ++j) {
        work[i].params[j].copy_(saved[i].params[j]);
      }
    }
    throw;
  }
  known_ = at::Tensor();
  if (metropolis) {
    known_ =
        at::where(decide(log_ratios, work, saved, turned), end_losses, losses);
  }
  if (heat != nullptr && observer() != nullptr) {
    if (metropolis) heat->look(MovingOf(work), {0, 1, 0});
    observer()->take(*heat, work);
  }
  advance(work);
  known_at_ = marks();
  return log_ratios;
}

// Trajectories are decided on by the host.
bool HMC::looks_later(const std::vector<Work>& /*work*/) const { return false; }

// Differ if parameters have been written to.
std::vector<std::pair<int64_t, const void*>> HMC::marks() const {
  std::vector<std::pair<int64_t, const void*>> marks;
  for (const at::Tensor& param : all_params()) {
    marks.emplace_back(VersionOf(param), param.const_data_ptr());
  }
  return marks;
}

// Sees losses that change where the parameters do not, as of minibatches.
// Rounding may change them, and a Gibbs step what they depend on: it warns,
// once.
void HMC::check_same_target(const at::Tensor& losses) {
  if (!known_.defined() || known_at_ != marks()) return;
  num_changes_ = ChangesRunning(num_changes_,
                                Numbers(known_),
                                Numbers(losses),
                                first().temperature(),
                                first().num_data());
  if (num_changes_ == kMostChanges) {
    TORCH_WARN(ChangedTarget());
  }
}

std::vector<HMC::Start> HMC::copies(const std::vector<Work>& work) {
  std::vector<Start> result;
  for (const Work& lists : work) {
    Start& saved = result.emplace_back();
    for (const at::Tensor& param : lists.params) {
      saved.params.push_back(param.detach().clone());
    }
    for (const at::Tensor& master : lists.masters) {
      saved.masters.push_back(master.clone());
    }
  }
  return result;
}

// Lists copies of the momenta and masters, or new ones, and the masses.
void HMC::prepare(Work& work) {
  const auto& options = OptionsOfWork<HMCOptions>(work);
  const int64_t every = options.resample_momentum_every();
  const bool draws_all = every > 0 && work.step.host % every == 0;
  work.state.resize(2);
  const bool has_mass =
      std::ranges::any_of(work.params, [&](const at::Tensor& param) {
        return state_of(param)["mass"].defined();
      });
  std::vector<at::Tensor> drawn;
  std::vector<at::Tensor> drawn_masses;
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < work.params.size(); ++i) {
    const SamplerParamState& state = state_of(work.params[i]);
    const at::Tensor& mass = state["mass"];
    const at::Tensor& master = state["master"];
    const at::Tensor& momentum = state["momentum"];
    if (has_mass) {
      work.state[kMasses].push_back(
          mass.defined() ? mass : ZeroState(work.params[i]).fill_(1));
    }
    if (HasMaster(work.params[i])) {
      work.masters.push_back(master.defined()
                                 ? master.clone()
                                 : work.params[i].detach().to(at::kFloat));
    }
    if (!draws_all && momentum.defined()) {
      work.state[kMomenta].push_back(momentum.clone());
      continue;
    }
    work.state[kMomenta].push_back(ZeroState(work.params[i]));
    drawn.push_back(work.state[kMomenta].back());
    if (has_mass) drawn_masses.push_back(work.state[kMasses].back());
    offsets.push_back(work.offsets[i]);
  }
  if (drawn.empty()) return;
  hmc_momenta_(drawn,
               drawn_masses,
               options.temperature(),
               offsets,
               seed(),
               work.step.host,
               /*rows=*/std::nullopt);
}

// Remembers momenta that are kept, and masters; the parameters have moved.
void HMC::update(const Work& work) {
  const bool keeps =
      OptionsOfWork<HMCOptions>(work).resample_momentum_every() != 1;
  size_t master = 0;
  for (size_t i = 0; i < work.params.size(); ++i) {
    if (HasMaster(work.params[i])) {
      own_state_of(work.params[i])["master"] = work.masters[master++];
    }
    if (keeps) {
      own_state_of(work.params[i])["momentum"] = work.state[kMomenta][i];
    } else {  // what a schedule left behind
      forget(work.params[i], "momentum");
    }
  }
}

// Makes the leapfrog steps; returns the loss at their end. What looks on at
// every one is null with the Metropolis test.
torch::Tensor HMC::integrate(const LossClosure& closure,
                             std::vector<Work>& work,
                             std::optional<int64_t> most_steps,
                             TrajectoryHeat* heat) {
  const double step_size = first().step_size();
  const int64_t steps = LeapfrogSteps(
      first().num_steps(), first().trajectory_length(), step_size, most_steps);
  const int64_t every = first().resample_momentum_every();
  const bool redrawn = every > 0 && work[0].step.host % every == 0;
  torch::Tensor loss;
  for (int64_t i = 0; i < steps; ++i) {
    const auto [force, warmth, turn] =
        HeatWeightsOf(i, steps, step_size, redrawn);
    if (heat != nullptr) heat->look(MovingOf(work), {force, 0, turn});
    leapfrog(work, i > 0 ? step_size : step_size / 2, step_size);
    if (heat != nullptr) heat->look(MovingOf(work), {0, warmth, 0});
    loss = FreshGradients(param_groups_, closure);
    std::vector<Work> following = gather();
    if (!SameParameters(work, following)) {
      throw std::runtime_error(
          "HMC got gradients of other parameters from the closure than at its "
          "first call in this step");
    }
    if (!first().metropolis()) check_finite(following);  // nothing rejects it
    for (size_t j = 0; j < work.size(); ++j) {
      work[j].grads = std::move(following[j].grads);
    }
  }
  leapfrog(work, step_size / 2, /*drift=*/0);
  return loss;
}

void HMC::leapfrog(const std::vector<Work>& work, double kick, double drift) {
  for (const Work& lists : work) {
    hmc_leapfrog_(lists.params,
                  lists.grads,
                  lists.state[kMomenta],
                  lists.state[kMasses],
                  lists.masters,
                  kick,
                  drift,
                  lists.options->num_data(),
                  lists.options->prior_precision(),
                  lists.options->prior_mean(),
                  MeansOf(lists.prior_means));
    BumpVersions(lists.params);
  }
}

// H of each chain, in float64, on the first parameter's device.
at::Tensor HMC::energy(const at::Tensor& losses,
                       const std::vector<Work>& work) const {
  const std::optional<int64_t>& chains = first().num_chains();
  const c10::Device device = losses.device();
  at::Tensor total = first().num_data() * losses;
  for (const Work& lists : work) {
    total = total + hmc_energy(lists.params,
                               lists.state[kMomenta],
                               lists.state[kMasses],
                               lists.options->prior_precision(),
                               chains.value_or(1),
                               lists.options->prior_mean(),
                               MeansOf(lists.prior_means))
                        .to(device);
  }
  return total;
}

// The Metropolis test: puts back the chains that are rejected. Returns which
// are accepted.
at::Tensor HMC::decide(const at::Tensor& log_ratios,
                       std::vector<Work>& work,
                       const std::vector<Start>& saved,
                       const std::vector<std::vector<at::Tensor>>& turned) {
  const at::Tensor finite = log_ratios.isfinite();
  at::Tensor accepted = finite.logical_and(
      metropolis_decide(log_ratios,
                        /*proposal=*/0,
                        static_cast<int64_t>(Purpose::kMetropolis),
                        seed(),
                        work[0].step.host));
  const int64_t all = accepted.numel();
  const auto yes = accepted.sum().item<int64_t>();
  if (yes < all) {
    for (size_t i = 0; i < work.size(); ++i) {
      const at::Tensor rejected =
          accepted.logical_not().to(work[i].params[0].device());
      select_chains_(work[i].params, saved[i].params, rejected);
      BumpVersions(work[i].params);
      if (!work[i].masters.empty()) {
        select_chains_(work[i].masters, saved[i].masters, rejected);
      }
      if (!turned[i].empty()) {
        select_chains_(work[i].state[kMomenta], turned[i], rejected);
      }
    }
  }
  const int64_t divergences = all - finite.sum().item<int64_t>();
  progress().add("num_trajectories", all);
  progress().add("num_accepted", yes);
  progress().add("num_divergences", divergences);
  return accepted;
}

}  // namespace torch_sgmcmc
