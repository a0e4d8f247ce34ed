// What the examples of a minibatch say together, for SBPS: they are few, and on
// the host.
#pragma once

#include <cmath>
#include <cstdint>

namespace torch_sgmcmc {

struct Moments {
  int64_t bad;      // losses that are not finite
  double mean;      // of the derivatives
  double variance;  // their sample variance
};

// Of `count` losses and as many derivatives, 2 at least, one after the other.
template <class T>
Moments MomentsOf(const T* losses, const T* derivatives, int64_t count) {
  Moments m{0, 0, 0};
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(losses[i])) ++m.bad;
    m.mean += static_cast<double>(derivatives[i]);
  }
  m.mean /= static_cast<double>(count);
  for (int64_t i = 0; i < count; ++i) {
    const double from_mean = static_cast<double>(derivatives[i]) - m.mean;
    m.variance += from_mean * from_mean;
  }
  m.variance /= static_cast<double>(count - 1);
  return m;
}

}  // namespace torch_sgmcmc
