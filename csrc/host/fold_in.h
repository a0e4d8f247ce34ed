// Seeds made of seeds: one for every chain, process or part of a model.
#pragma once

#include <cstdint>

#include "core/counter.h"
#include "core/portable_noise.h"

namespace torch_sgmcmc {

// The seed of a stream: 64 bits of Philox, a pure function of its arguments.
inline int64_t FoldIn(int64_t seed, uint64_t stream) {
  uint32_t w[4];
  portable::QuadWords({static_cast<uint64_t>(seed),
                       /*step=*/0,
                       static_cast<uint32_t>(Purpose::kSeed)},
                      stream,
                      w);
  return static_cast<int64_t>(static_cast<uint64_t>(w[1]) << 32 | w[0]);
}

}  // namespace torch_sgmcmc
