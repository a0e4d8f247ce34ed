// Philox4x32-10 against the known-answer vectors that Random123 publishes
// (kat_vectors), for every lane type, and the layout of the counter.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "lane_probes.h"
#include "random/portable_noise.h"

namespace torch_sgmcmc {
namespace {

struct KnownAnswer {
  uint32_t counter[4];
  uint32_t key[2];
  std::array<uint32_t, 4> output;
};

constexpr KnownAnswer kKnownAnswers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

class PhiloxLanes : public LaneTest {};

TEST_P(PhiloxLanes, KnownAnswers) {
  for (const KnownAnswer& k : kKnownAnswers) {
    uint32_t out[kMaxWideLanes][4];
    GetParam().philox(k.counter, k.key, out);
    for (int lane = 0; lane < GetParam().wide_lanes; ++lane) {
      EXPECT_EQ(std::to_array(out[lane]), k.output) << "lane " << lane;
    }
  }
}

INSTANTIATE_LANE_TEST(PhiloxLanes);

TEST(PhiloxBlock, KnownAnswers) {
  for (const KnownAnswer& k : kKnownAnswers) {
    uint32_t out[4];
    portable::PhiloxBlock(
        k.counter, static_cast<uint64_t>(k.key[1]) << 32 | k.key[0], out);
    EXPECT_EQ(std::to_array(out), k.output);
  }
}

// The layout is part of the checkpoint format, so it is pinned by numbers that
// do not come from this library: the third vector, as the noise of an element.
TEST(CounterLayout, IsPinnedByAKnownAnswer) {
  const NoiseStream stream{
      .seed = 0x299f31d0a4093822, .step = 0x734413198a2e, .purpose = 0x0370};
  uint32_t out[4];
  portable::QuadWords(stream, /*quad=*/0x85a308d3243f6a88, out);
  EXPECT_EQ(std::to_array(out), kKnownAnswers[2].output);
}

TEST(CounterLayout, LargestStepAndPurposeFillTheWordsWithoutOverlap) {
  const NoiseStream step{.seed = 0, .step = kMaxStep, .purpose = 0};
  EXPECT_EQ(step.counter2(), 0xffffffffu);
  EXPECT_EQ(step.counter3(), 0x0000ffffu);
  const NoiseStream purpose{.seed = 0, .step = 0, .purpose = kMaxPurpose};
  EXPECT_EQ(purpose.counter2(), 0u);
  EXPECT_EQ(purpose.counter3(), 0xffff0000u);
}

}  // namespace
}  // namespace torch_sgmcmc
