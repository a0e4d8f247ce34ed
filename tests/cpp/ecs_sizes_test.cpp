// The sizes of HMC-ECS's subsample.
#include "host/ecs_sizes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace torch_sgmcmc {
namespace {

TEST(ECSSizes, SubsampleIsProportionalToTheVariance) {
  EXPECT_EQ(MeanOf({1, 2, 6}), 3);
  EXPECT_EQ(ChooseSubsampleSize({1.5, 2.5}, 100, 0.5, 100000), 400);
  EXPECT_EQ(ChooseSubsampleSize({2.001}, 100, 0.5, 100000), 401);
  // Not too few to estimate a variance from, unless there were fewer.
  EXPECT_EQ(ChooseSubsampleSize({0.01}, 100, 0.5, 100000), 30);
  EXPECT_EQ(ChooseSubsampleSize({0.01}, 12, 0.5, 100000), 12);
  // Not more than there are data.
  EXPECT_EQ(ChooseSubsampleSize({2.0}, 100, 0.5, 250), 250);
  EXPECT_EQ(ChooseSubsampleSize({2.0}, 100, 0.5, 1), 2);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(ChooseSubsampleSize({kInfinity}, 100, 0.5, 250), 250);
}

// Of the effective draws, with minibatch estimates of this variance.
double KeptBySigns(double spread, int64_t products) {
  const auto size = static_cast<double>(products);
  const double negative = 0.5 * std::erfc(size / std::sqrt(2 * spread));
  return std::exp(-4 * size * negative);
}

TEST(ECSSizes, ProductsKeepTheSignsPositive) {
  // A large variance: that of the log decides. A small one: the signs do.
  EXPECT_EQ(ChooseNumProducts({3.0, 5.0}, 100, 0.5), 800);
  for (const double spread : {0.5, 4.0, 60.0}) {
    const int64_t chosen = ChooseNumProducts({spread / 10}, 10, 1e9);
    EXPECT_GE(KeptBySigns(spread, chosen), 0.98);
    ASSERT_GT(chosen, 1);
    EXPECT_LT(KeptBySigns(spread, chosen - 1 - chosen / 10), 0.98);
  }
  EXPECT_EQ(ChooseNumProducts({0.0}, 100, 0.5), 1);
}

TEST(ECSSizes, LeastTimeIsThreeTimesTheDeepestFallOrAVarianceOfOne) {
  const std::vector<double> means = {-4, -6};
  EXPECT_EQ(ChooseNumProductsByLowest({2, 4}, 50, means, {-9.5, -11.5}), 20);
  EXPECT_EQ(ChooseNumProductsByLowest({2, 4}, 50, means, {-9.5, -999}), 150);
  EXPECT_EQ(ChooseNumProductsByLowest({0.0}, 50, {0.0}, {0.0}), 1);
}

}  // namespace
}  // namespace torch_sgmcmc
