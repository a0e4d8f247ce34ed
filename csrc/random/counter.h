// The layout of all random bits.
//
// Note [Counter layout]
// All randomness is Philox4x32-10 keyed by the 64-bit seed, with counter words
//   c0 = quad, low 32 bits     quad = element / 4; word `element % 4` of the
//   c1 = quad, high 32 bits           output block belongs to that element
//   c2 = step, low 32 bits     step counts the sampler's updates
//   c3 = step bits 32..47, then the 16-bit purpose in the high half
// The element index is offset + position: every parameter owns a range of
// element indices from the sampler's construction on, so that a missing
// gradient, another grouping or order of calls does not shift noise. (seed,
// step, purpose, element) is never used twice: a new kind of draw needs a new
// Purpose. A chain depends on neither threads, device nor instruction set.
#pragma once

#include <cstdint>

#include "random/macros.h"

namespace torch_sgmcmc {

// The purpose of a draw. Resumed chains depend on the values: never change one.
enum class Purpose : uint32_t {
  kUpdate = 0,       // the noise injected by one update
  kMomentum = 1,     // momentum drawn from its stationary law
  kPrecision = 2,    // Gibbs updates of prior precisions (host side)
  kIndexChain = 3,   // decisions of EWSG's index chain
  kProbe = 4,        // random signs that probe the diagonal of a Hessian
  kMetropolis = 5,   // decisions on the trajectories of Hamiltonian samplers
  kBounceClock = 6,  // arrivals and decisions of SBPS's bounce clock
  kRefreshment = 7,  // velocities drawn on the unit sphere
  kMinibatch = 8,    // minibatches drawn uniformly (host side)
  kSubsample = 10,   // the data in HMC-ECS's subsamples (host side)
  kSubsampleBlock =
      11,         // which block of a subsample is drawn again (host side)
  kPoisson = 12,  // numbers of minibatches in its factors (host side)
  kSeed = 13,     // seeds made of seeds (host side)
  kPrior = 14     // parameters drawn from the prior
};

constexpr int64_t kMaxStep = (int64_t{1} << 48) - 1;
constexpr int64_t kMaxPurpose = (int64_t{1} << 16) - 1;

// Noise is made in aligned blocks of so many elements. Samplers start
// parameters at multiples; operators accept any offset.
constexpr int64_t kNoiseBlock = 128;
constexpr int64_t kQuadBlock = kNoiseBlock / 4;

// One stream of normals, indexed by element.
struct NoiseStream {
  uint64_t seed;
  uint64_t step;
  uint32_t purpose;

  SG_HOST_DEVICE uint32_t counter2() const {
    return static_cast<uint32_t>(step);
  }
  SG_HOST_DEVICE uint32_t counter3() const {
    return (static_cast<uint32_t>(step >> 32) & 0xFFFF) | (purpose << 16);
  }
};

inline NoiseStream KeyedStream(int64_t seed, uint64_t step, Purpose purpose) {
  return {static_cast<uint64_t>(seed), step, static_cast<uint32_t>(purpose)};
}

// Note [Skipped steps]
// A device_step is added to an operator's step. With a negative one the
// operator changes nothing: on a GPU the host need not know of a failed finite
// check.
constexpr int64_t kLeftOut = -1;

// Adds the device's part of the step; false if the update is skipped.
SG_INLINE bool AddDeviceStep(const int64_t* device_step, NoiseStream& stream) {
  if (device_step == nullptr) return true;
  if (*device_step < 0) return false;
  stream.step += static_cast<uint64_t>(*device_step);
  return true;
}

// The device_step of an update that is skipped if a value is not finite.
SG_INLINE int64_t GatedStep(bool is_nonfinite, int64_t step,
                            const int64_t* device_step) {
  if (is_nonfinite) return kLeftOut;
  return device_step == nullptr ? step : step + *device_step;
}

}  // namespace torch_sgmcmc
