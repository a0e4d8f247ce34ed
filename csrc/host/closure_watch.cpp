#include "host/closure_watch.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>

namespace torch_sgmcmc {

int64_t ChangesRunning(int64_t before,
                       const std::vector<double>& known,
                       const std::vector<double>& now,
                       double temperature,
                       double num_data) {
  if (known.size() != now.size()) return 0;  // num_chains has changed
  const double least = 0.1 * temperature / num_data;
  for (size_t chain = 0; chain < now.size(); ++chain) {
    const double most = std::max(1e-3 * std::abs(now[chain]), least);
    if (std::abs(now[chain] - known[chain]) > most) return before + 1;
  }
  return 0;
}

std::string ChangedTarget() {
  return "HMC got another loss at the start of " +
         std::to_string(kMostChanges) +
         " trajectories running than there was at the end of the one before, at "
         "the same parameters: the closure must compute the loss of all data, "
         "always the same (no minibatches, no dropout), unless what else it "
         "depends on is sampled in between";
}

std::optional<int64_t> EqualRunning(std::optional<int64_t> before,
                                    bool equal,
                                    bool zero,
                                    const std::string& hint,
                                    const std::string& off) {
  if (!before || !equal) return std::nullopt;
  if (zero) return before;
  if (*before + 1 < kMostEqual) return *before + 1;
  throw std::runtime_error(
      "EWSG got the gradient of the minibatch before from " +
      std::to_string(kMostEqual) +
      " calls of the closure running, which must draw a fresh minibatch at "
      "each call" +
      hint +
      ". If each minibatch is all data, there is nothing to choose from: use "
      "SGHMC, or " +
      off);
}

}  // namespace torch_sgmcmc
