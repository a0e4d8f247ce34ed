// The choice of the instruction set: its names and the environment variable.
#include "random/isa.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "lane_probes.h"

namespace torch_sgmcmc {
namespace {

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
    try {
      std::exit(static_cast<int>(ActiveIsa()));
    } catch (const std::runtime_error& error) {
      std::fputs(error.what(), stderr);
      std::exit(99);
    }
  }
};

TEST(IsaName, IsWhatTheEnvironmentVariableTakes) {
  EXPECT_STREQ(IsaName(Isa::kPortable), "portable");
  EXPECT_STREQ(IsaName(Isa::kAvx2), "avx2");
  EXPECT_STREQ(IsaName(Isa::kAvx512), "avx512");
}

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

TEST_F(ActiveIsaTest, UnknownNameIsAnErrorThatListsTheNames) {
  EXPECT_EXIT(ExitWithChoiceFor("sse9"), testing::ExitedWithCode(99),
              "Invalid TORCH_SGMCMC_ISA: 'sse9' "
              "\\(must be portable, avx2 or avx512\\)");
}

}  // namespace
}  // namespace torch_sgmcmc
