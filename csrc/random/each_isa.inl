// Includes the file SG_EACH_ISA once for each instruction set, in its
// namespace.

// NOLINTBEGIN(readability-duplicate-include)
#if defined(SG_X86)
SG_REGION_AVX512
namespace torch_sgmcmc::avx512 {
#include SG_EACH_ISA
}  // namespace torch_sgmcmc::avx512
SG_REGION_END

SG_REGION_AVX2
namespace torch_sgmcmc::avx2 {
#include SG_EACH_ISA
}  // namespace torch_sgmcmc::avx2
SG_REGION_END
#endif

namespace torch_sgmcmc::portable {
#include SG_EACH_ISA
}  // namespace torch_sgmcmc::portable
// NOLINTEND(readability-duplicate-include)

#undef SG_EACH_ISA
