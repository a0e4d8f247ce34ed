// How many steps a trajectory has, and shares of what was counted.
#include "host/leapfrog_steps.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "host/ratio.h"

namespace torch_sgmcmc {
namespace {

TEST(LeapfrogSteps, AreAsManyAsGiven) {
  EXPECT_EQ(LeapfrogSteps(7, {}, 0.1), 7);
  EXPECT_EQ(LeapfrogSteps(7, {}, 0.1, 5), 5);
  EXPECT_EQ(LeapfrogSteps(7, {}, 0.1, kMostWarmupSteps), 7);
}

TEST(LeapfrogSteps, AreTheNearestToTheLength) {
  EXPECT_EQ(LeapfrogSteps({}, 1.0, 0.25), 4);
  EXPECT_EQ(LeapfrogSteps({}, 1.24, 0.5), 2);
  EXPECT_EQ(LeapfrogSteps({}, 1.25, 0.5), 3);
  EXPECT_EQ(LeapfrogSteps({}, 0.01, 0.5), 1);
  EXPECT_EQ(LeapfrogSteps({}, 1.0, 1e-3), 1000);
  EXPECT_EQ(LeapfrogSteps({}, 1.0, 1e-4, kMostWarmupSteps), 1024);
}

TEST(LeapfrogSteps, AreBoundedWhereTheQuotientIsNot) {
  for (const double length : {1e30, 1e300}) {
    EXPECT_EQ(LeapfrogSteps({}, length, 1e-300), int64_t{1} << 53);
    EXPECT_EQ(LeapfrogSteps({}, length, 1e-300, 1024), 1024);
  }
}

TEST(Ratio, IsNoNumberBeforeThereIsAny) {
  EXPECT_EQ(Ratio(1, 4), 0.25);
  EXPECT_EQ(Ratio(0, 4), 0);
  EXPECT_TRUE(std::isnan(Ratio(0, 0)));
}

}  // namespace
}  // namespace torch_sgmcmc
