// The decisions of Metropolis chains: EWSG's chain over minibatches (eq. 5 of
// its paper), and HMC's over trajectories, which has one proposal a step.
//
// Proposal m of chain k owns the quad 2^24 k + m (Note [Counter layout]). Host
// and device decide bitwise identically.
#pragma once

#include <string.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "random/counter.h"
#include "random/macros.h"
#include "random/portable_noise.h"

namespace torch_sgmcmc {

constexpr int64_t kMaxProposals = int64_t{1} << 24;

// ln u for a normal number u in (0, 1): u = 2^e m with m in [1/sqrt 2, sqrt 2),
// ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...), s = (m - 1) / (m + 1), |s| < 0.172.
SG_INLINE double LogOfUniform(double u) {
  constexpr uint64_t kSqrtHalf = 0x3FE6A09E667F3BCDull;
  uint64_t bits;
  memcpy(&bits, &u, sizeof bits);
  const int64_t e = static_cast<int64_t>(bits - kSqrtHalf) >> 52;
  bits -= static_cast<uint64_t>(e) << 52;
  double m;
  memcpy(&m, &bits, sizeof m);
  const double s = (m - 1.0) / (m + 1.0);
  const double t = s * s;
  double p = 0;
  for (int k = 21; k >= 3; k -= 2) p = (p + 1.0 / k) * t;
  const double r = 2.0 * (s + s * p);
  return static_cast<double>(e) * 0.69314718055994530942 + r;
}

// The uniform in (0, 1), of 52 random bits, that decides on a proposal.
SG_INLINE double IndexUniform(const NoiseStream& stream, uint64_t chain,
                              uint64_t proposal) {
  uint32_t w[4];
  portable::QuadWords(stream, chain << 24 | proposal, w);
  const uint64_t bits = (static_cast<uint64_t>(w[0]) << 32 | w[1]) >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// True with probability min(1, exp(log_ratio)), false for NaN.
SG_INLINE bool IndexChainAccepts(double log_ratio, const NoiseStream& stream,
                                 uint64_t chain, uint64_t proposal) {
  if (log_ratio >= 0) return true;
  return LogOfUniform(IndexUniform(stream, chain, proposal)) < log_ratio;
}

// So many first proposals with the previous minibatch's gradient are a fault:
// if a fraction p of pairs has equal gradients, their probability is p^100,
// below 2^-40 for p <= 0.75.
constexpr int64_t kMostEqual = 100;

// Returns the number of equal proposals so far, none after an unequal one. Zero
// gradients do not count. Throws std::runtime_error at kMostEqual, with a
// `hint` and `off`, the setting that makes no proposals.
inline std::optional<int64_t> EqualRunning(std::optional<int64_t> before,
                                           bool equal, bool zero,
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
