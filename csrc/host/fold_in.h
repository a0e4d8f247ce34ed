// Seeds made of seeds: one for every chain, process or part of a model.
#pragma once

#include <cstdint>

#include "random/portable_noise.h"

namespace torch_sgmcmc {

// The seed of a stream: 64 bits of Philox, a pure function of its arguments.
inline int64_t FoldIn(int64_t seed, uint64_t stream) {
  return static_cast<int64_t>(
      portable::ChainSeed(static_cast<uint64_t>(seed), stream));
}

}  // namespace torch_sgmcmc
