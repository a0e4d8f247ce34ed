// Dual averaging against the recursion as it is printed in the paper, and its
// errors.
#include "host/dual_averaging.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/metropolis.h"
#include "message_of.h"

namespace torch_sgmcmc {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(DualAveraging, FollowsThePaper) {
  const std::vector<double> accepted = {0.1, 0.9, 1, 0, 0.75, 0.3};
  const double mu = std::log(10 * 0.3);
  double error = 0;
  double log_average = 0;
  DualAveraging adaptation(0.3, 0.8);
  EXPECT_DOUBLE_EQ(adaptation.step_size(), 0.3);
  for (int t = 1; t <= 60; ++t) {
    const double a = accepted[static_cast<size_t>(t) % accepted.size()];
    error = (1 - 1.0 / (t + 10)) * error + (0.8 - a) / (t + 10);
    const double log = mu - std::sqrt(t) / 0.05 * error;
    const double share = std::pow(t, -0.75);
    log_average = share * log + (1 - share) * log_average;
    const double size = adaptation.Update(a);
    EXPECT_NEAR(size / std::exp(log), 1, 1e-12);
    EXPECT_EQ(size, adaptation.step_size());
    EXPECT_NEAR(adaptation.averaged() / std::exp(log_average), 1, 1e-12);
    EXPECT_EQ(adaptation.count(), t);
  }
}

TEST(DualAveraging, FindsTheSizeOfATarget) {
  // Accepted with probability exp(-size): 0.65 at -log 0.65.
  DualAveraging adaptation(100, 0.65);
  for (int t = 0; t < 3000; ++t) {
    adaptation.Update(std::exp(-adaptation.step_size()));
  }
  EXPECT_NEAR(adaptation.averaged() / -std::log(0.65), 1, 0.02);
}

TEST(DualAveraging, ContinuesFromItsState) {
  DualAveraging whole(0.5, 0.7);
  for (int t = 0; t < 20; ++t) whole.Update(t % 3 / 2.0);
  DualAveraging rest(whole.state());
  EXPECT_EQ(rest.target(), 0.7);
  for (int t = 0; t < 20; ++t) {
    EXPECT_EQ(rest.Update(t % 5 / 4.0), whole.Update(t % 5 / 4.0));
  }
  EXPECT_EQ(rest.state(), whole.state());
}

TEST(DualAveraging, StaysFinite) {
  DualAveraging adaptation(1, 0.5);
  for (int t = 0; t < 1000; ++t) EXPECT_GT(adaptation.Update(0), 0);
  for (int t = 0; t < 100000; ++t) {
    ASSERT_TRUE(std::isfinite(adaptation.Update(1)));
  }
}

TEST(DualAveraging, RefusesWhatIsOutOfRange) {
  const auto size = [](double x) {
    return MessageOf<std::invalid_argument>([&] { DualAveraging(x, 0.8); });
  };
  const std::string wanted = " (must be finite and > 0)";
  EXPECT_EQ(size(0), "Invalid step_size: 0.000000" + wanted);
  EXPECT_EQ(size(-1), "Invalid step_size: -1.000000" + wanted);
  EXPECT_EQ(size(kInfinity), "Invalid step_size: inf" + wanted);
  for (const double target : {0.0, 1.0}) {
    EXPECT_EQ(
        MessageOf<std::invalid_argument>([&] { DualAveraging(1, target); }),
        "Invalid target: " + std::to_string(target) + " (must be in (0, 1))");
  }
  DualAveraging adaptation(1, 0.8);
  for (const double a : {-0.1, 1.1}) {
    EXPECT_EQ(
        MessageOf<std::invalid_argument>([&] { adaptation.Update(a); }),
        "Invalid acceptance: " + std::to_string(a) + " (must be in [0, 1])");
  }
  EXPECT_EQ(adaptation.count(), 0);
  for (const auto& [place, value] :
       {std::pair(1, kNaN), {2, -1.0}, {2, 0.5}, {5, kInfinity}}) {
    DualAveraging::State state = adaptation.state();
    state[static_cast<size_t>(place)] = value;
    EXPECT_EQ(
        MessageOf<std::invalid_argument>([&] { DualAveraging other(state); }),
        "Invalid state of dual averaging (must be finite, with a whole "
        "count)");
  }
  for (const size_t size : {0, 1, 5, 7}) {
    const std::vector<double> numbers(size, 0.5);
    EXPECT_EQ(
        MessageOf<std::invalid_argument>([&] { DualAveraging other(numbers); }),
        "Invalid state of dual averaging (must be finite, with a whole "
        "count)");
  }
}

TEST(MeanAcceptance, CountsWhatIsNotFiniteAsRejected) {
  EXPECT_EQ(MeanAcceptance({}), 0);
  EXPECT_EQ(MeanAcceptance({0, 5}), 1);
  EXPECT_EQ(MeanAcceptance({-1, kNaN, kInfinity, -kInfinity}),
            std::exp(-1) / 4);
}

}  // namespace
}  // namespace torch_sgmcmc
