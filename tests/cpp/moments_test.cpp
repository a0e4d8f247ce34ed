// The rate of SBPS by the examples of a minibatch.
#include "host/moments.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace torch_sgmcmc {
namespace {

const std::vector<double> kLosses = {1, 2, 3, 4};
const std::vector<double> kDerivatives = {1, 3, 5, 7};  // 4, and 20 / 3

Moments Of(const std::vector<double>& losses) {
  return MomentsOf(losses.data(), kDerivatives.data(), 4);
}

TEST(RateOf, IsOfTheWholeEnergy) {
  const RateEstimate rate = RateOf(Of(kLosses), 100, 2, true, 6);
  EXPECT_EQ(rate.value, 100 * 4 / 2.0 + 6 / 2.0);
  // Of a mean of 4, and 50 of these.
  EXPECT_DOUBLE_EQ(rate.variance, 20 / 3.0 / 4 * 50 * 50);
  EXPECT_TRUE(rate.finite());
}

TEST(RateOf, VariesLessWithoutReplacement) {
  const double with = RateOf(Of(kLosses), 16, 1, true, 0).variance;
  EXPECT_DOUBLE_EQ(RateOf(Of(kLosses), 16, 1, false, 0).variance,
                   with * 12 / 16);
  EXPECT_EQ(RateOf(Of(kLosses), 4, 1, false, 0).variance, 0);
}

TEST(RateOf, SaysWhatIsNotFinite) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(RateOf(Of(kLosses), 16, 1, true, kInfinity).finite());
  EXPECT_FALSE(RateOf({0, 4, 1, kInfinity}, 16, 1, true, 0).finite());
  EXPECT_EQ(Of({1, kInfinity, 3, -kInfinity}).bad, 2);
}

TEST(Rate, KnowsWhatIsNotFinite) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(RateOf({3, 5, kInfinity, 1}, 16, 1, true, 0).finite());
}

}  // namespace
}  // namespace torch_sgmcmc
