// Which line SBPS's particle is on, by the state and by what users have
// changed.
#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "host/bounce_clock.h"
#include "libtorch/bouncy/flight.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/diagonal.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"
#include "torch_sgmcmc/has_cuda.h"
#include "torch_sgmcmc/sbps.h"

namespace torch_sgmcmc {
namespace {

// Whether a user gave the preconditioner.
bool IsGiven(const SamplerParamState& state) {
  return state["preconditioner"].defined() &&
         !state["square_average"].defined();
}

}  // namespace

// The parameters that require gradients, by device and prior.
std::shared_ptr<Flight> SBPS::moving() const {
  std::vector<FlightPart> parts;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const SBPSOptions& options = options_at(i);
    const auto& params = param_groups_[i].params();
    check_known(i);
    for (size_t j = 0; j < params.size(); ++j) {
      const at::Tensor& p = params[j];
      if (!p.requires_grad() || p.numel() == 0) continue;
      if (p.is_cuda() && !has_cuda()) {
        throw std::runtime_error(
            "SBPS got parameters on a CUDA device, but torch_sgmcmc was built "
            "without CUDA kernels: rebuild it with -DTORCH_SGMCMC_CUDA=ON");
      }
      const at::Tensor mean = prior_mean_of(p);
      auto part =
          std::find_if(parts.begin(), parts.end(), [&](const FlightPart& x) {
            return x.params[0].device() == p.device() &&
                   x.prior_precision == options.prior_precision() &&
                   x.prior_means.empty() != mean.defined() &&
                   (mean.defined() || x.prior_mean == options.prior_mean());
          });
      if (part == parts.end()) {
        parts.push_back({options.prior_precision(),
                         options.num_data(),
                         options.prior_mean(),
                         {},
                         {},
                         {},
                         {},
                         {},
                         {},
                         {},
                         {}});
        part = parts.end() - 1;
      }
      part->params.push_back(p);
      if (mean.defined()) part->prior_means.push_back(mean);
      part->offsets.push_back(offsets_of(i)[j]);
    }
  }
  if (parts.empty()) {
    throw std::runtime_error("SBPS has no parameter that requires gradients");
  }
  return std::make_shared<Flight>(std::move(parts));
}

// Throws if an operator would refuse a parameter or its state, as one may after
// others have moved.
void SBPS::check_particle() const {
  std::vector<Work> all(param_groups_.size());
  for (size_t i = 0; i < all.size(); ++i) {
    // Not to be changed.
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    all[i].options = &const_cast<SBPSOptions&>(options_at(i));
    all[i].step = {num_steps()};
    for (const at::Tensor& p : param_groups_[i].params()) {
      if (!p.requires_grad()) continue;
      all[i].params.push_back(p);
      all[i].grads.push_back(p);
    }
  }
  check_fit(all);
}

// The flight that the state holds; null if it fits no longer.
std::shared_ptr<Flight> SBPS::resumed() {
  const std::shared_ptr<Flight> still = moving();
  const auto flying = std::ranges::count_if(state_, [](const auto& known) {
    const auto& state = static_cast<const SamplerParamState&>(*known.second);
    return state["velocity"].defined();
  });
  if (static_cast<size_t>(flying) != still->params().size()) return nullptr;
  const bool preconditioned = options_at(0).preconditioned();
  const bool learns = preconditioned && !is_given(still->params());
  std::vector<FlightPart> parts = still->parts();
  for (FlightPart& part : parts) {
    for (const at::Tensor& p : part.params) {
      const SamplerParamState& state = state_of(p);
      const auto take = [&](const char* key, std::vector<at::Tensor>& list) {
        list.push_back(state[key]);
        return list.back().defined();
      };
      if (!take("origin", part.origin) || !take("velocity", part.velocity)) {
        return nullptr;
      }
      if (!preconditioned) continue;
      if (!take("direction", part.direction) ||
          !take("preconditioner", part.preconditioner) ||
          state["square_average"].defined() != learns) {
        return nullptr;
      }
      if (learns) take("square_average", part.square_average);
    }
  }
  return std::make_shared<Flight>(std::move(parts));
}

// Whether a flight is the one that the state holds, of the same parameters.
bool SBPS::is_current(const Flight& flight) {
  size_t wanted = 0;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& p : group.params()) {
      if (p.requires_grad() && p.numel() > 0) ++wanted;
    }
  }
  if (wanted != flight.params().size()) return false;
  if (flight.preconditioned() != options_at(0).preconditioned()) return false;
  for (const FlightPart& part : flight.parts()) {
    for (size_t i = 0; i < part.params.size(); ++i) {
      const at::Tensor& p = part.params[i];
      if (!p.requires_grad()) return false;
      if (!state_of(p)["origin"].is_same(part.origin[i])) return false;
    }
  }
  return true;
}

// The current flight; another one if the user has changed something.
std::shared_ptr<Flight> SBPS::flight_now(SBPSOptions& progress,
                                         BounceClock& clock) {
  std::vector<double> target = {progress.num_data(), progress.temperature()};
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    target.push_back(options_at(i).prior_precision());
  }
  std::vector<double> means;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    means.push_back(options_at(i).prior_mean());
  }
  // As in Python, which has them only where one is not 0.
  if (std::ranges::any_of(means, [](double mean) { return mean != 0; })) {
    target.insert(target.end(), means.begin(), means.end());
  }
  const bool same_target =
      target == progress.get<std::vector<double>>("observed_target");
  std::shared_ptr<Flight> flight = flight_;
  if (flight == nullptr || !same_target || !is_current(*flight)) {
    flight = resumed();
  }
  if (flight != nullptr && flight->is_at(progress.get<double>("line_time"))) {
    if (!same_target) clock.Restart();
  } else {
    if (flight != nullptr) {
      flight = flight->rebased();
    } else {
      const std::shared_ptr<Flight> still = moving();
      const bool preconditioned = progress.preconditioned();
      const bool are_given = preconditioned && is_given(still->params());
      for (FlightPart& part : still->parts()) {
        for (const at::Tensor& p : part.params) {
          part.velocity.push_back(ZeroState(p));
          part.origin.push_back(p.detach().to(
              part.velocity.back().scalar_type(), false, /*copy=*/true));
          if (!preconditioned) continue;
          if (are_given) {
            part.preconditioner.push_back(given_preconditioner(p));
            continue;
          }
          const at::Tensor& known = state_of(p)["square_average"];
          part.square_average.push_back(known.defined() ? known : ZeroState(p));
        }
      }
      flight = still->refreshed(0, progress, seed(), num_steps());
    }
    flight->mark(0);
    progress.put("line_time", 0.0);
    clock.Restart();
  }
  progress.put("observed_target", target);
  return flight;
}

// Takes a flight into the state of the parameters.
void SBPS::remember(const Flight& flight) {
  std::vector<std::pair<at::Tensor, at::Tensor>> given;
  for (const at::Tensor& p : all_params()) {
    given.emplace_back(p, given_preconditioner(p));
  }
  state_.clear();
  for (const auto& [p, preconditioner] : given) {
    if (!preconditioner.defined()) continue;
    own_state_of(p)["preconditioner"] = preconditioner;
  }
  for (const FlightPart& part : flight.parts()) {
    for (size_t i = 0; i < part.params.size(); ++i) {
      SamplerParamState& state = own_state_of(part.params[i]);
      state["origin"] = part.origin[i];
      state["velocity"] = part.velocity[i];
      if (!flight.preconditioned()) continue;
      state["direction"] = part.direction[i];
      state["preconditioner"] = part.preconditioner[i];
      if (flight.learns()) state["square_average"] = part.square_average[i];
    }
  }
}

// ---- The preconditioner that a user gave ------------------------------------

void SBPS::check_saved_state(const SamplerParamState& state,
                             int64_t index) const {
  if (!IsGiven(state)) return;
  CheckSavedDiagonal("preconditioner", index, state["preconditioner"]);
}

// Undefined if there is none.
at::Tensor SBPS::given_preconditioner(const at::Tensor& param) const {
  const SamplerParamState& state = state_of(param);
  return IsGiven(state) ? state["preconditioner"] : at::Tensor();
}

// Whether users gave the preconditioners of these; throws if of a part of them.
bool SBPS::is_given(const std::vector<at::Tensor>& params) const {
  const auto lacks = [&](const at::Tensor& p) {
    return !given_preconditioner(p).defined();
  };
  const auto lacking = std::ranges::find_if(params, lacks);
  if (lacking != params.end() && !std::ranges::all_of(params, lacks)) {
    throw std::runtime_error(
        "SBPS has no preconditioner for a parameter of shape " +
        Shape(lacking->sizes()) +
        ", and was given those of others: call set_preconditioner() for all");
  }
  return lacking == params.end();
}

void SBPS::set_preconditioner(const std::vector<at::Tensor>& preconditioner) {
  check_preconditioned();
  const std::vector<at::Tensor> params = all_params();
  const std::vector<at::Tensor> kept =
      Diagonals("preconditioner", preconditioner, params);
  state_.clear();
  for (size_t i = 0; i < params.size(); ++i) {
    own_state_of(params[i])["preconditioner"] = kept[i];
  }
}

void SBPS::set_preconditioner(std::nullopt_t /*none*/) {
  check_preconditioned();
  const bool are_given = std::ranges::any_of(
      all_params(),
      [&](const at::Tensor& p) { return given_preconditioner(p).defined(); });
  if (are_given) state_.clear();
}

void SBPS::check_preconditioned() const {
  if (options_at(0).preconditioned()) return;
  Invalid(
      "Invalid preconditioned: false (must be true to set a preconditioner)");
}

}  // namespace torch_sgmcmc
