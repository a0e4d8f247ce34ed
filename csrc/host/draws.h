// Uniform and Gamma random numbers of float64 resolution from the counter-based
// noise, on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "random/counter.h"
#include "random/portable_noise.h"

namespace torch_sgmcmc {

struct UniformPair {
  double first;
  double second;
};

// Two uniforms in (0, 1) with 52 random bits each: the words of one quad.
inline UniformPair Uniforms(const NoiseStream& stream, uint64_t quad) {
  uint32_t w[4];
  portable::QuadWords(stream, quad, w);
  const auto uniform = [](uint32_t high, uint32_t low) {
    const uint64_t bits = (static_cast<uint64_t>(high) << 32 | low) >> 12;
    return (static_cast<double>(bits) + 0.5) * 0x1p-52;
  };
  return {uniform(w[0], w[1]), uniform(w[2], w[3])};
}

// The seed of a stream: 64 bits of Philox, a pure function of its arguments.
inline int64_t FoldIn(int64_t seed, uint64_t stream) {
  return static_cast<int64_t>(
      portable::ChainSeed(static_cast<uint64_t>(seed), stream));
}

// One Gamma(shape, 1) variate (Marsaglia and Tsang 2000). Throws
// std::invalid_argument unless shape is finite and positive.
//
// Draw `element` owns the quads [element 2^16, (element + 1) 2^16) (Note
// [Counter layout]), far more than rejection uses.
inline double DrawGamma(double shape, const NoiseStream& stream,
                        uint64_t element) {
  if (!std::isfinite(shape) || shape <= 0) {
    throw std::invalid_argument("Invalid shape: " + std::to_string(shape) +
                                " (must be finite and > 0)");
  }
  constexpr double kTwoPi = 6.283185307179586476925;
  const double d = (shape < 1 ? shape + 1 : shape) - 1.0 / 3.0;
  const double c = 1.0 / std::sqrt(9.0 * d);
  for (uint64_t quad = element << 16;; quad += 2) {
    const UniformPair a = Uniforms(stream, quad);
    const UniformPair b = Uniforms(stream, quad + 1);
    const double x =
        std::sqrt(-2.0 * std::log(a.first)) * std::cos(kTwoPi * a.second);
    const double t = 1.0 + c * x;
    if (t <= 0) continue;
    const double v = t * t * t;
    if (std::log(b.first) < 0.5 * x * x + d - d * v + d * std::log(v)) {
      // For shape < 1: Gamma(shape) = Gamma(shape + 1) U^(1 / shape).
      const double boost = shape < 1 ? std::pow(b.second, 1.0 / shape) : 1.0;
      return d * v * boost;
    }
  }
}

}  // namespace torch_sgmcmc
