// The samples of a trajectory: at the multiples of an interval.
#pragma once

#include <cmath>
#include <cstdint>

namespace torch_sgmcmc {

// How many multiples k * interval, k >= 1, are not after the time. Products
// decide, which are the times of the samples, for a quotient may be rounded up
// or down to another whole number.
inline int64_t SamplesBy(double time, double interval) {
  const double quotient = std::floor(time / interval);
  if (quotient >= 0x1p53) return int64_t{1} << 53;  // nearer than times can be
  const auto count = static_cast<int64_t>(quotient);
  if (static_cast<double>(count) * interval > time) return count - 1;
  const bool more = static_cast<double>(count + 1) * interval <= time;
  return count + static_cast<int64_t>(more);
}

}  // namespace torch_sgmcmc
