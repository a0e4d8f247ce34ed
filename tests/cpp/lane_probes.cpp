#include "lane_probes.h"

#include "random/isa.h"
#include "random/macros.h"
#include "random/portable_noise.h"

#if defined(SG_X86)
SG_REGION_AVX512
namespace torch_sgmcmc::avx512 {
namespace {
#include "random/lanes_avx512.inl"
#include "random/noise.inl"
#include "lane_probe.inl"
}  // namespace
}  // namespace torch_sgmcmc::avx512
SG_REGION_END

SG_REGION_AVX2
namespace torch_sgmcmc::avx2 {
namespace {
#include "random/lanes_avx2.inl"
#include "random/noise.inl"
#include "lane_probe.inl"
}  // namespace
}  // namespace torch_sgmcmc::avx2
SG_REGION_END
#endif

namespace torch_sgmcmc::portable {
namespace {
#include "lane_probe.inl"
}  // namespace
}  // namespace torch_sgmcmc::portable

namespace torch_sgmcmc {
namespace {

std::vector<LaneProbe> MakeProbes() {
  std::vector<LaneProbe> probes = {
      {"portable", true, portable::ProbeFill<portable::BoxMuller>,
       portable::ProbeFill<portable::Uniforms>, portable::ProbeBoxMuller}};
#if defined(SG_X86)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  probes.push_back({"avx2", has_avx2, avx2::ProbeFill<avx2::BoxMuller>,
                    avx2::ProbeFill<avx2::Uniforms>, avx2::ProbeBoxMuller});
  const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  probes.push_back({"avx512", has_avx512, avx512::ProbeFill<avx512::BoxMuller>,
                    avx512::ProbeFill<avx512::Uniforms>,
                    avx512::ProbeBoxMuller});
#endif
  return probes;
}

}  // namespace

const std::vector<LaneProbe>& LaneProbes() {
  static const std::vector<LaneProbe> probes = MakeProbes();
  return probes;
}

}  // namespace torch_sgmcmc
