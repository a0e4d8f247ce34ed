// How probable it was that Metropolis tests accept, for what adapts to it.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace torch_sgmcmc {

// The mean over tests of min(1, exp(log ratio)), 0 for a ratio that is not
// finite; 0 if there are none.
inline double MeanAcceptance(const std::vector<double>& log_ratios) {
  if (log_ratios.empty()) return 0;
  double sum = 0;
  for (const double ratio : log_ratios) {
    if (std::isfinite(ratio)) sum += ratio >= 0 ? 1.0 : std::exp(ratio);
  }
  return sum / static_cast<double>(log_ratios.size());
}

}  // namespace torch_sgmcmc
