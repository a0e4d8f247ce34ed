// Statistics of draws.
//
// Seeds are fixed, so the tests are deterministic; the thresholds say how often
// a correct generator with a new seed would fail: once in 10^6 statistics.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace torch_sgmcmc {

inline constexpr double kMaxZ = 4.9;
inline constexpr double kMaxKolmogorov = 2.7;

// The distance of numbers from uniform ones, times the root of how many there
// are.
inline double Kolmogorov(std::vector<double> u) {
  std::sort(u.begin(), u.end());
  const auto n = static_cast<double>(u.size());
  double distance = 0;
  for (size_t i = 0; i < u.size(); ++i) {
    const auto rank = static_cast<double>(i);
    distance = std::max({distance, u[i] - rank / n, (rank + 1) / n - u[i]});
  }
  return distance * std::sqrt(n);
}

// How far a count is from what a probability makes of all draws.
inline double ZOfShare(double count, double total, double p) {
  return std::abs(count - total * p) / std::sqrt(total * p * (1 - p));
}

}  // namespace torch_sgmcmc
