// Which multiples of an interval a trajectory has passed.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "host/bounce_clock.h"

namespace torch_sgmcmc {
namespace {

TEST(SampleTimes, AreCountedByTheirProducts) {
  EXPECT_EQ(SamplesBy(0, 0.5), 0);
  EXPECT_EQ(SamplesBy(0.4, 0.5), 0);
  EXPECT_EQ(SamplesBy(0.5, 0.5), 1);
  EXPECT_EQ(SamplesBy(1.9, 0.5), 3);
  EXPECT_EQ(SamplesBy(1, 1e-300), int64_t{1} << 53);
}

// At the very times, and next to them, where quotients are rounded to either
// side.
TEST(SampleTimes, AreRightToTheLastBit) {
  int other = 0;
  for (const double interval : {0.1, 0.3, 0.7, 1e-3, 1.0 / 3, 49.0}) {
    for (int64_t k = 1; k < 5000; ++k) {
      const double time = static_cast<double>(k) * interval;
      const double before = std::nextafter(time, 0.0);
      ASSERT_EQ(SamplesBy(time, interval), k);
      ASSERT_EQ(SamplesBy(std::nextafter(time, 1e9), interval), k);
      ASSERT_EQ(SamplesBy(before, interval), k - 1);
      other += static_cast<int>(std::floor(before / interval) !=
                                static_cast<double>(k - 1));
    }
  }
  EXPECT_GT(other, 0);  // of the quotients
}

}  // namespace
}  // namespace torch_sgmcmc
