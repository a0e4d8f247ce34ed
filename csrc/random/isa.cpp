#include "random/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace torch_sgmcmc {
namespace {

constexpr Isa kAll[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};

Isa Detect() {
#if defined(SG_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") &&
                    __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("popcnt");
  const bool avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

Isa Choose() {
  const Isa best = Detect();
  const char* wish = std::getenv("TORCH_SGMCMC_ISA");
  if (wish == nullptr || *wish == '\0') return best;
  for (const Isa isa : kAll) {
    if (std::string(wish) == IsaName(isa)) return isa < best ? isa : best;
  }
  throw std::runtime_error("Invalid TORCH_SGMCMC_ISA: '" + std::string(wish) +
                           "' (must be portable, avx2 or avx512)");
}

}  // namespace

Isa ActiveIsa() {
  static const Isa isa = Choose();
  return isa;
}

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "portable";
  }
}

}  // namespace torch_sgmcmc
