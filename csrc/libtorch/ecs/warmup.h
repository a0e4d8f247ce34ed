// How far a warm-up of HMC-ECS is: torch_sgmcmc/ecs/warmup.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "host/dual_averaging.h"
#include "torch_sgmcmc/hmcecs.h"

namespace torch_sgmcmc {

// What a warm-up remembers of a draw, and not its subsample.
struct ECSDraw {
  at::Tensor theta;
  double variance = 0;
  double mean = 0;
  double lowest = 0;
};

// Whole steps alone.
struct ECSWarmup {
  int64_t steps;
  double target_acceptance;
  int64_t anchor_every;
  std::optional<double> target_variance;
  int64_t done;
  DualAveraging adaptation;
  std::vector<ECSDraw> draws;  // since theta* was chosen last

  // Throws if it was begun with other arguments.
  void check(int64_t now_steps, const HMCECSWarmup& settings) const;

  StateDict save() const;
  // That of `size` elements of theta.
  static ECSWarmup Load(const StateDict& saved,
                        int64_t size,
                        c10::Device device);
};

// Those that are used.
std::vector<ECSDraw> LateDraws(const std::vector<ECSDraw>& draws);

}  // namespace torch_sgmcmc
