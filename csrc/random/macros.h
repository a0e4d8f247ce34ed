// Compiler spellings used by code that is shared between CPU and CUDA.
#pragma once

#if defined(__CUDACC__)
#define SG_HOST_DEVICE __host__ __device__
#else
#define SG_HOST_DEVICE
#endif

#define SG_INLINE inline SG_HOST_DEVICE __attribute__((always_inline))

// A loop that stays one.
#if defined(__CUDACC__)
#define SG_NO_UNROLL _Pragma("unroll 1")
#else
#define SG_NO_UNROLL
#endif

// Full unrolling of a loop with a constant trip count.
#if defined(__CUDACC__)
#define SG_UNROLL _Pragma("unroll")
#elif defined(__clang__)
#define SG_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SG_UNROLL _Pragma("GCC unroll 16")
#endif
