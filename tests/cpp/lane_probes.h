// The noise source of every instruction set, behind one interface for tests.
//
// Unlike the drivers, which use the best instruction set that TORCH_SGMCMC_ISA
// allows, these run all that the processor has, in one process.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <vector>

#include "random/counter.h"

namespace torch_sgmcmc {

struct LaneProbe {
  const char* name;
  bool available;  // on this processor
  // With normals, and with uniform numbers.
  using Fill = void (*)(float* out, uint64_t first_quad, int64_t blocks,
                        const NoiseStream& stream);
  Fill normals;
  Fill uniforms;
  // `count` must be a multiple of 16.
  void (*box_muller)(const uint32_t* w0, const uint32_t* w1, int64_t count,
                     float* z0, float* z1);
};

// Portable first; AVX2 and AVX-512 on x86.
const std::vector<LaneProbe>& LaneProbes();

inline void PrintTo(const LaneProbe& probe, std::ostream* out) {
  *out << probe.name;
}

// Runs a test once for each entry of LaneProbes(), skipping what the processor
// lacks.
class LaneTest : public testing::TestWithParam<LaneProbe> {
 protected:
  void SetUp() override {
    if (!GetParam().available) GTEST_SKIP() << "not on this processor";
  }
};

#define INSTANTIATE_LANE_TEST(suite)                                           \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, testing::ValuesIn(LaneProbes()),        \
                           [](const testing::TestParamInfo<LaneProbe>& info) { \
                             return info.param.name;                           \
                           })

}  // namespace torch_sgmcmc
