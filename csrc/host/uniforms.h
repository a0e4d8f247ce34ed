// Uniform random numbers of float64 resolution from the counter-based noise.
#pragma once

#include <cstdint>

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

}  // namespace torch_sgmcmc
