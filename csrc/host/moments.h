// Moments of a minibatch's losses and derivatives, and SBPS's bounce rate.
#pragma once

#include <cmath>
#include <cstdint>

namespace torch_sgmcmc {

struct Moments {
  int64_t bad;     // losses that are not finite
  int64_t count;   // of examples
  double mean;     // of the derivatives
  double squares;  // the sum of the squares of their distances from it
};

// Of `count` >= 2 losses and derivatives.
template <class T>
Moments MomentsOf(const T* losses, const T* derivatives, int64_t count) {
  Moments m{0, count, 0, 0};
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(losses[i])) ++m.bad;
    m.mean += static_cast<double>(derivatives[i]);
  }
  m.mean /= static_cast<double>(count);
  for (int64_t i = 0; i < count; ++i) {
    const double from_mean = static_cast<double>(derivatives[i]) - m.mean;
    m.squares += from_mean * from_mean;
  }
  return m;
}

struct RateEstimate {
  double value;     // G
  double variance;  // c^2

  bool finite() const {
    return std::isfinite(value) && std::isfinite(variance);
  }
};

// The rate of change of U / T along a line, from the moments and the prior's
// part of the derivative of U. Draws without replacement have less variance.
inline RateEstimate RateOf(const Moments& m, double num_data,
                           double temperature, bool replacement, double prior) {
  const auto n = static_cast<double>(m.count);
  const double variance = m.squares / static_cast<double>(m.count - 1);
  const double scale = num_data / temperature;
  const double correction = replacement ? 1 : 1 - n / num_data;
  return {scale * m.mean + prior / temperature,
          variance * correction * (scale * scale / n)};
}

}  // namespace torch_sgmcmc
