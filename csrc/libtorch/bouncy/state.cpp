// Which line SBPS's particle is on, by the state and by what users have
// changed.
#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/bounce_clock.h"
#include "libtorch/bouncy/flight.h"
#include "libtorch/core/momentum.h"
#include "torch_sgmcmc/has_cuda.h"
#include "torch_sgmcmc/sbps.h"

namespace torch_sgmcmc {

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
      part->offsets.push_back(options.offsets()[j]);
    }
  }
  if (parts.empty()) {
    throw std::runtime_error("SBPS has no parameter that requires gradients");
  }
  return std::make_shared<Flight>(std::move(parts));
}

// The flight that the state holds; null if it fits no longer.
std::shared_ptr<Flight> SBPS::resumed() {
  std::vector<FlightPart> parts = moving()->parts();
  const bool preconditioned = options_at(0).preconditioned();
  size_t flying = 0;
  for (FlightPart& part : parts) {
    for (const at::Tensor& p : part.params) {
      const auto found = state_.find(p.unsafeGetTensorImpl());
      if (found == state_.end()) return nullptr;
      const auto& state = static_cast<const SBPSParamState&>(*found->second);
      if (!state.velocity.defined() || !state.origin.defined()) return nullptr;
      if (preconditioned &&
          !(state.square_average.defined() && state.preconditioner.defined() &&
            state.direction.defined())) {
        return nullptr;
      }
      ++flying;
      part.origin.push_back(state.origin);
      part.velocity.push_back(state.velocity);
      if (!preconditioned) continue;
      part.square_average.push_back(state.square_average);
      part.preconditioner.push_back(state.preconditioner);
      part.direction.push_back(state.direction);
    }
  }
  if (flying != state_.size()) return nullptr;
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
  for (const FlightPart& part : flight.parts()) {
    if (part.square_average.empty() == options_at(0).preconditioned()) {
      return false;
    }
    for (size_t i = 0; i < part.params.size(); ++i) {
      const auto found = state_.find(part.params[i].unsafeGetTensorImpl());
      if (found == state_.end() || !part.params[i].requires_grad()) {
        return false;
      }
      const auto& state = static_cast<const SBPSParamState&>(*found->second);
      if (!state.origin.is_same(part.origin[i])) return false;
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
  // Else as before there were any.
  if (std::ranges::any_of(means, [](double mean) { return mean != 0; })) {
    target.insert(target.end(), means.begin(), means.end());
  }
  const bool same_target = target == progress.observed_target_.get();
  std::shared_ptr<Flight> flight = flight_;
  if (flight == nullptr || !same_target || !is_current(*flight)) {
    flight = resumed();
  }
  if (flight != nullptr && flight->is_at(progress.line_time_.get())) {
    if (!same_target) clock.Restart();
  } else {
    if (flight != nullptr) {
      flight = flight->rebased();
    } else {
      std::vector<FlightPart> parts = moving()->parts();
      for (FlightPart& part : parts) {
        for (const at::Tensor& p : part.params) {
          part.velocity.push_back(ZeroState(p));
          part.origin.push_back(p.detach().to(
              part.velocity.back().scalar_type(), false, /*copy=*/true));
          if (!progress.preconditioned()) continue;
          const auto found = state_.find(p.unsafeGetTensorImpl());
          const auto* known =
              found == state_.end()
                  ? nullptr
                  : static_cast<const SBPSParamState*>(found->second.get());
          part.square_average.push_back(known != nullptr &&
                                                known->square_average.defined()
                                            ? known->square_average
                                            : ZeroState(p));
        }
      }
      const Flight still(std::move(parts));
      flight = still.refreshed(0, progress, seed());
    }
    flight->mark(0);
    progress.line_time_.set(0.0);
    clock.Restart();
  }
  progress.observed_target_.set(std::move(target));
  return flight;
}

// Takes a flight into the state of the parameters.
void SBPS::remember(const Flight& flight) {
  state_.clear();
  for (const FlightPart& part : flight.parts()) {
    for (size_t i = 0; i < part.params.size(); ++i) {
      auto& state = static_cast<SBPSParamState&>(state_of(part.params[i]));
      state.origin = part.origin[i];
      state.velocity = part.velocity[i];
      if (part.square_average.empty()) continue;
      state.square_average = part.square_average[i];
      state.preconditioner = part.preconditioner[i];
      state.direction = part.direction[i];
    }
  }
}

}  // namespace torch_sgmcmc
