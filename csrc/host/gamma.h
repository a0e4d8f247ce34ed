// Gamma random numbers from the counter-based noise, in float64 on the host.
//
// Draw `element` of a stream is a pure function of (seed, step, purpose,
// element, shape), like every other draw (Note [Counter layout]): it owns the
// quads [element 2^16, (element + 1) 2^16), far more than rejection ever uses.
#pragma once

#include <cstdint>

#include "random/counter.h"

namespace torch_sgmcmc {

// One Gamma(shape, 1) variate (Marsaglia and Tsang 2000). Throws
// std::invalid_argument unless shape is finite and positive.
double DrawGamma(double shape, const NoiseStream& stream, uint64_t element);

}  // namespace torch_sgmcmc
