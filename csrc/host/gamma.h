// Gamma random numbers from the counter-based noise, in float64 on the host.
//
// Draw `element` owns the quads [element 2^16, (element + 1) 2^16) (Note
// [Counter layout]), far more than rejection uses.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "host/uniforms.h"
#include "random/counter.h"

namespace torch_sgmcmc {

// One Gamma(shape, 1) variate (Marsaglia and Tsang 2000). Throws
// std::invalid_argument unless shape is finite and positive.
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
