// The innermost CPU loop of updates, for drivers (apply/cpu.h) and for sums
// that are taken in the same pass (apply/reduce.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "core/isa.h"
#include "core/macros.h"
#include "core/roles.h"

// NOLINTBEGIN(readability-duplicate-include): once for each instruction set.
#if defined(SG_X86)
SG_REGION_AVX512
namespace torch_sgmcmc::avx512 {
#include "apply/elements.inl"
}  // namespace torch_sgmcmc::avx512
SG_REGION_END

SG_REGION_AVX2
namespace torch_sgmcmc::avx2 {
#include "apply/elements.inl"
}  // namespace torch_sgmcmc::avx2
SG_REGION_END
#endif

namespace torch_sgmcmc::portable {
#include "apply/elements.inl"
}  // namespace torch_sgmcmc::portable
// NOLINTEND(readability-duplicate-include)
