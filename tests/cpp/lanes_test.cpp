// Every lane type gives the bits of the portable one.
#include <bit>
#include <cstdlib>

#include "lane_probes.h"
#include "random/isa.h"
#include "random/portable_noise.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

constexpr float kCanary = 1234.5f;

using Quad = void (*)(const NoiseStream& stream, uint64_t quad, float (&z)[4]);

// Expects `blocks` blocks from first_quad on to equal single quads, and the
// memory around them to be left alone. `shift` makes the output unaligned.
void ExpectFill(LaneProbe::Fill fill, Quad single, uint64_t first_quad,
                int64_t blocks, const NoiseStream& stream, int shift) {
  const int64_t count = blocks * kNoiseBlock;
  std::vector<float> out(static_cast<size_t>(count + 32), kCanary);
  fill(out.data() + shift, first_quad, blocks, stream);
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; i += 4) {
    float z[4];
    single(stream, first_quad + static_cast<uint64_t>(i / 4), z);
    for (int w = 0; w < 4; ++w) {
      const float got = out[static_cast<size_t>(shift + i + w)];
      wrong += std::bit_cast<uint32_t>(got) != std::bit_cast<uint32_t>(z[w]);
    }
  }
  EXPECT_EQ(wrong, 0) << "first_quad " << first_quad << ", blocks " << blocks
                      << ", seed " << stream.seed << ", step " << stream.step
                      << ", purpose " << stream.purpose;
  for (int64_t i = 0; i < count + 32; ++i) {
    if (i < shift || i >= shift + count) {
      ASSERT_EQ(out[static_cast<size_t>(i)], kCanary) << "at " << i - shift;
    }
  }
}

void ExpectFill(const LaneProbe& probe, uint64_t first_quad, int64_t blocks,
                const NoiseStream& stream, int shift) {
  ExpectFill(probe.normals, portable::QuadNormals, first_quad, blocks, stream,
             shift);
  ExpectFill(probe.uniforms, portable::QuadNoise<portable::Uniforms>,
             first_quad, blocks, stream, shift);
}

class Lanes : public LaneTest {};

TEST_P(Lanes, FillMatchesPortableForAllKindsOfCounters) {
  const uint64_t seeds[] = {0,
                            1,
                            0xffffffff,
                            uint64_t{1} << 32,
                            uint64_t{1} << 63,
                            0x0123456789abcdef,
                            ~uint64_t{0}};
  const uint64_t steps[] = {0, 1, 0xffffffff, uint64_t{1} << 32,
                            static_cast<uint64_t>(kMaxStep)};
  const uint32_t purposes[] = {0, 1, 2, 0x8000, 0xffff};
  const uint64_t quads[] = {0, kQuadBlock, 1000 * kQuadBlock,
                            uint64_t{1} << 40};
  for (const uint64_t seed : seeds) {
    for (const uint64_t step : steps) {
      for (const uint32_t purpose : purposes) {
        for (const uint64_t quad : quads) {
          ExpectFill(GetParam(), quad, 1, {seed, step, purpose}, 0);
        }
      }
    }
  }
}

// Where the low word of the quad's number overflows into the high word.
TEST_P(Lanes, FillMatchesPortableAcrossMultiplesOfTwoToThe32) {
  const NoiseStream stream{77, 5, 1};
  for (const uint64_t edge :
       {uint64_t{1} << 32, uint64_t{1} << 33, uint64_t{0xabcdef} << 32,
        uint64_t{1} << 60, uint64_t{0} /* that is, 2^64 */}) {
    for (uint64_t before = 0; before <= 4; ++before) {
      for (int64_t blocks = 1; blocks <= 8; ++blocks) {
        ExpectFill(GetParam(), edge - before * kQuadBlock, blocks, stream, 0);
      }
    }
  }
}

TEST_P(Lanes, FillMatchesPortableForAnyNumberOfBlocksAndAlignment) {
  for (int64_t blocks = 0; blocks <= 9; ++blocks) {
    for (int shift = 0; shift < 17; ++shift) {
      ExpectFill(GetParam(), 96 * kQuadBlock, blocks, {3, 4, 0}, shift);
    }
  }
}

TEST_P(Lanes, FillMatchesPortableOnALongRun) {
  ExpectFill(GetParam(), 0, 4096, {20240607, 12345, 0}, 0);
}

// Words that Philox would hit once in 2^32 draws, and a million random ones.
TEST_P(Lanes, TransformMatchesPortableOnExtremeAndRandomWords) {
  std::vector<uint32_t> special = {0, 1, 2, 3, 0x7fffffff, 0x80000001};
  for (int bit = 0; bit < 32; ++bit) {
    for (const uint32_t near : {0u, 1u, ~0u}) {
      special.push_back((uint32_t{1} << bit) + near);
      special.push_back(~((uint32_t{1} << bit) + near));
    }
  }
  std::vector<uint32_t> w0, w1;
  for (const uint32_t a : special) {
    for (const uint32_t b : special) {
      w0.push_back(a);
      w1.push_back(b);
    }
  }
  std::mt19937 random(1);
  while (w0.size() < (size_t{1} << 20)) {
    w0.push_back(static_cast<uint32_t>(random()));
    w1.push_back(static_cast<uint32_t>(random()));
  }
  const size_t n = w0.size();
  std::vector<float> z0(n), z1(n), e0(n), e1(n);
  GetParam().box_muller(w0.data(), w1.data(), static_cast<int64_t>(n),
                        z0.data(), z1.data());
  LaneProbes()[0].box_muller(w0.data(), w1.data(), static_cast<int64_t>(n),
                             e0.data(), e1.data());
  for (size_t i = 0; i < n; ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(z0[i]), std::bit_cast<uint32_t>(e0[i]))
        << std::hex << w0[i] << " " << w1[i];
    ASSERT_EQ(std::bit_cast<uint32_t>(z1[i]), std::bit_cast<uint32_t>(e1[i]))
        << std::hex << w0[i] << " " << w1[i];
  }
}

TEST(Uniforms, AreTheWordsInTheirOrderBetweenMinusOneAndOne) {
  const NoiseStream stream{5, 6, 0};
  double sum = 0;
  double squares = 0;
  constexpr uint64_t kQuads = 1 << 18;
  for (uint64_t quad = 0; quad < kQuads; ++quad) {
    uint32_t words[4];
    float u[4];
    portable::QuadWords(stream, quad, words);
    portable::QuadNoise<portable::Uniforms>(stream, quad, u);
    for (int i = 0; i < 4; ++i) {
      const double exact = (static_cast<int32_t>(words[i]) + 0.5) / 0x1p31;
      ASSERT_NEAR(u[i], exact, 0x1p-24 * std::abs(exact) + 0x1p-32);
      sum += u[i];
      squares += u[i] * u[i];
    }
  }
  // Within four standard errors.
  constexpr double kCount = 4.0 * kQuads;
  EXPECT_NEAR(sum / kCount, 0, 4 / std::sqrt(3 * kCount));
  EXPECT_NEAR(squares / kCount, 1.0 / 3, 4 * std::sqrt(4.0 / 45 / kCount));
}

INSTANTIATE_LANE_TEST(Lanes);

// The choice of the instruction set; unknown names: test_noise_stream.py.

constexpr Isa kAll[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};

bool IsAvailable(Isa isa) {
  for (const LaneProbe& probe : LaneProbes()) {
    if (std::string(probe.name) == IsaName(isa)) return probe.available;
  }
  return false;
}

Isa Best() {
  Isa best = Isa::kPortable;
  for (const Isa isa : kAll) {
    if (IsAvailable(isa)) best = isa;
  }
  return best;
}

// ActiveIsa decides once per process, so each case runs in a new one.
class ActiveIsaTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  [[noreturn]] static void ExitWithChoiceFor(const char* wish) {
    if (wish == nullptr) {
      unsetenv("TORCH_SGMCMC_ISA");
    } else {
      setenv("TORCH_SGMCMC_ISA", wish, /*replace=*/1);
    }
    std::exit(static_cast<int>(ActiveIsa()));
  }
};

TEST_F(ActiveIsaTest, IsTheBestOfTheProcessorByDefault) {
  const auto best = testing::ExitedWithCode(static_cast<int>(Best()));
  EXPECT_EXIT(ExitWithChoiceFor(nullptr), best, "");
  EXPECT_EXIT(ExitWithChoiceFor(""), best, "");
}

TEST_F(ActiveIsaTest, CanBeLoweredButNotRaised) {
  for (const Isa wish : kAll) {
    const Isa expected = wish < Best() ? wish : Best();
    EXPECT_EXIT(ExitWithChoiceFor(IsaName(wish)),
                testing::ExitedWithCode(static_cast<int>(expected)), "");
  }
}

}  // namespace
}  // namespace torch_sgmcmc
