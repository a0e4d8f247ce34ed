// Sees closures of EWSG that do not draw minibatches, by what they have
// returned. It cannot be told from a single call.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace torch_sgmcmc {

// So many proposals with the gradient of the minibatch before them, from the
// first on, are no chance: if of all pairs of minibatches a share p has equal
// gradients, it is one of probability p^100, below 2^-40 up to p = 0.75.
// (Minibatches of one datum of two have p = 0.5.)
constexpr int64_t kMostEqual = 100;

// How many there are with a present one whose gradient is `equal` to that
// before, after so many; none once one was not. Zero gradients do not count: of
// a loss without data, say. Throws std::runtime_error if there are kMostEqual:
// `hint` is on what to do, and `off` the setting that chooses from nothing.
inline std::optional<int64_t> EqualRunning(std::optional<int64_t> before,
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
