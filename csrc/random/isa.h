// The instruction set of the CPU loops.
//
// Loops are compiled for several instruction sets in one binary: .inl files are
// included once per region below, each in its namespace (launch/cpu.h). All
// give the same bits; TORCH_SGMCMC_ISA=portable (or avx2) restricts the choice,
// which is made once per process.
#pragma once

#if defined(__x86_64__) && !defined(__CUDACC__)
#define SG_X86 1
// gcc 12 warns of uninitialised vectors in its own header.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define SG_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define SG_REGION_BEGIN(isa) \
  SG_PRAGMA(                 \
      clang attribute push(__attribute__((target(isa))), apply_to = function))
#define SG_REGION_END SG_PRAGMA(clang attribute pop)
#define SG_REGION_AVX512 \
  SG_REGION_BEGIN("popcnt,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
#else
#define SG_REGION_BEGIN(isa)  \
  SG_PRAGMA(GCC push_options) \
  SG_PRAGMA(GCC target(isa))
#define SG_REGION_END SG_PRAGMA(GCC pop_options)
#define SG_REGION_AVX512 \
  SG_REGION_BEGIN(       \
      "popcnt,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define SG_REGION_AVX2 SG_REGION_BEGIN("popcnt,avx2,fma,f16c")

// A call of a function that random/each_isa.inl has compiled for an instruction
// set.
#if defined(SG_X86)
#define SG_CALL_ON(isa, ...)                   \
  ((isa) == Isa::kAvx512 ? avx512::__VA_ARGS__ \
   : (isa) == Isa::kAvx2 ? avx2::__VA_ARGS__   \
                         : portable::__VA_ARGS__)
#else
#define SG_CALL_ON(isa, ...) (static_cast<void>(isa), portable::__VA_ARGS__)
#endif

namespace torch_sgmcmc {

enum class Isa { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// The best instruction set of this processor that TORCH_SGMCMC_ISA allows.
// Throws std::runtime_error if that variable holds an unknown name.
Isa ActiveIsa();
const char* IsaName(Isa isa);

}  // namespace torch_sgmcmc
