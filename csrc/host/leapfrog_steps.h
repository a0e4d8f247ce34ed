// How many leapfrog steps a trajectory of HMC and HMC-ECS has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

namespace torch_sgmcmc {

// Early in a warm-up the step size may be far too small, and a trajectory of
// given length endless.
constexpr int64_t kMostWarmupSteps = 1024;

// The number that is given, or else the nearest to length / step_size (a half
// goes up), and 1 at least; at most `most`, and 2^53 without it, since the
// quotient may be beyond all integers.
inline int64_t LeapfrogSteps(const std::optional<int64_t>& num_steps,
                             const std::optional<double>& length,
                             double step_size,
                             const std::optional<int64_t>& most = {}) {
  const int64_t bound = most.value_or(int64_t{1} << 53);
  if (num_steps) return std::min(*num_steps, bound);
  const double nearest = std::floor(*length / step_size + 0.5);
  return static_cast<int64_t>(
      std::clamp(nearest, 1.0, static_cast<double>(bound)));
}

}  // namespace torch_sgmcmc
