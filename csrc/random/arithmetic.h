// Fused multiply-add and reciprocal roots for host and device, float and
// double.
//
// Functors spell out fused operations, and compilers fuse nothing else
// (-ffp-contract=off, -fmad=false), so that chains are bitwise identical on all
// instruction sets and devices.
#pragma once

#include <math.h>

#include <cstdint>

#include "random/macros.h"

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

// The correctly rounded square root; an update has time for one.
SG_INLINE float SquareRoot(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

SG_INLINE double SquareRoot(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

// 1 / sqrt(x) for x > 0, to 1.5 units in the last place; finite at 0.
//
// Division and square root are slow. For floats of the normal range, a guess
// from the exponent, an iteration with equal error bounds (6.5e-4, Moroz et al.
// 2018) and one of third order take ten operations, bitwise identical on all
// processors.
SG_INLINE float ReciprocalRoot(float x) {
#if defined(__CUDA_ARCH__)
  float y = __uint_as_float(0x5F1FFFF9u - (__float_as_uint(x) >> 1));
#else
  float y = __builtin_bit_cast(
      float, 0x5F1FFFF9u - (__builtin_bit_cast(uint32_t, x) >> 1));
#endif
  y = y * Fma(x * (y * y), -0.703952253f, 1.68191391f);
  const float e = Fma(-(x * y), y, 1.0f);
  return Fma(y * e, Fma(0.375f, e, 0.5f), y);
}

SG_INLINE double ReciprocalRoot(double x) {
  return 1 / sqrt(x > 0 ? x : 0x1p-1022);
}

}  // namespace torch_sgmcmc
