// The noise of random/noise.inl for one quad in plain C++, for host and device.
#pragma once

#include <math.h>
#include <string.h>

#include <cstdint>
#include <utility>

#include "random/counter.h"
#include "random/macros.h"

namespace torch_sgmcmc::portable {

#include "random/lanes_portable.inl"
#include "random/noise.inl"

// One Philox4x32-10 block: out = Philox(counter, key).
SG_INLINE void PhiloxBlock(const uint32_t (&counter)[4], uint64_t key,
                           uint32_t (&out)[4]) {
  Philox<1> p{{{counter[0], counter[1], counter[2], counter[3]}},
              static_cast<uint32_t>(key),
              static_cast<uint32_t>(key >> 32)};
  p.AllRounds();
  out[0] = static_cast<uint32_t>(p.c[0].w0);
  out[1] = static_cast<uint32_t>(p.c[0].w1);
  out[2] = static_cast<uint32_t>(p.c[0].w2);
  out[3] = static_cast<uint32_t>(p.c[0].w3);
}

// The random words of one quad of a stream (Note [Counter layout]).
SG_INLINE void QuadWords(const NoiseStream& stream, uint64_t quad,
                         uint32_t (&out)[4]) {
  PhiloxBlock({static_cast<uint32_t>(quad), static_cast<uint32_t>(quad >> 32),
               stream.counter2(), stream.counter3()},
              stream.seed, out);
}

// The seed of a chain: 64 bits of Philox.
SG_INLINE uint64_t ChainSeed(uint64_t seed, uint64_t chain) {
  const NoiseStream stream{seed, 0, static_cast<uint32_t>(Purpose::kSeed)};
  Philox<1> p{
      {{static_cast<uint32_t>(chain), static_cast<uint32_t>(chain >> 32),
        stream.counter2(), stream.counter3()}},
      static_cast<uint32_t>(seed),
      static_cast<uint32_t>(seed >> 32)};
  // Once a thread: a loop keeps kernels small.
  SG_NO_UNROLL for (int round = 0; round < 10; ++round) p.Round();
  return uint64_t{static_cast<uint32_t>(p.c[0].w1)} << 32 |
         static_cast<uint32_t>(p.c[0].w0);
}

// The four numbers of one quad of a stream.
template <template <int> class Noise>
SG_INLINE void QuadNoise(const NoiseStream& stream, uint64_t quad,
                         float (&out)[4]) {
  uint32_t w[4];
  QuadWords(stream, quad, w);
  // All is set below. NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  Noise<2> pairs;
  for (int i = 0; i < 2; ++i) {
    pairs.w0[i] = w[2 * i];
    pairs.w1[i] = w[2 * i + 1];
  }
  pairs.AllSteps();
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = pairs.z0[i];
    out[2 * i + 1] = pairs.z1[i];
  }
}

SG_INLINE void QuadNormals(const NoiseStream& stream, uint64_t quad,
                           float (&out)[4]) {
  QuadNoise<BoxMuller>(stream, quad, out);
}

}  // namespace torch_sgmcmc::portable
