// What looks on while a sampler steps.
#pragma once

#include <memory>
#include <vector>

#include "host/flight_heat.h"
#include "libtorch/core/trajectory_heat.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

class Flight;

class StepObserver {
 public:
  StepObserver() = default;
  StepObserver(const StepObserver&) = delete;
  StepObserver(StepObserver&&) = delete;
  StepObserver& operator=(const StepObserver&) = delete;
  StepObserver& operator=(StepObserver&&) = delete;
  virtual ~StepObserver() = default;

  // The sampler is elsewhere, or null if there is none any more.
  virtual void follow(Sampler* sampler) noexcept = 0;

  // Before an update.
  virtual void look(const std::vector<Work>& work) = 0;

  // What sums along the trajectory that begins with this work; null if it is
  // not to be observed.
  virtual std::unique_ptr<TrajectoryHeat> trajectory(
      const std::vector<Work>& work) = 0;

  // It has ended.
  virtual void take(const TrajectoryHeat& heat,
                    const std::vector<Work>& work) = 0;

  // A piece of a line that was flown.
  virtual void fly(const std::shared_ptr<const Flight>& line,
                   const FlightPiece& piece) = 0;
};

}  // namespace torch_sgmcmc
