// Fused multiply-add for host and device, float and double.
//
// Update functors spell out every fused operation and the compilers are told
// not to fuse anything else (-ffp-contract=off, -fmad=false): that is what
// makes a chain equal to the last bit on all instruction sets and devices.
#pragma once

#include <math.h>

#include "core/macros.h"

namespace torch_sgmcmc {

SG_INLINE float Fma(float x, float y, float z) {
#if defined(__CUDA_ARCH__)
  return fmaf(x, y, z);
#else
  return __builtin_fmaf(x, y, z);
#endif
}

SG_INLINE double Fma(double x, double y, double z) {
#if defined(__CUDA_ARCH__)
  return fma(x, y, z);
#else
  return __builtin_fma(x, y, z);
#endif
}

}  // namespace torch_sgmcmc
