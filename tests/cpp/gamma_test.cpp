// Gamma variates: moments and distribution against theory.
#include "host/gamma.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <stdexcept>
#include <vector>

#include "random/counter.h"
#include "statistics.h"

namespace torch_sgmcmc {
namespace {

constexpr int kDraws = 400000;

NoiseStream Stream(uint64_t seed, uint64_t step) {
  return {seed, step, static_cast<uint32_t>(Purpose::kPrecision)};
}

std::vector<double> Draws(double shape) {
  std::vector<double> x(kDraws);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = DrawGamma(shape, Stream(20240607, 3), i);
  }
  return x;
}

// 39201 = 1 + 78400 / 2 is the posterior shape of a 784 x 100 weight matrix.
constexpr double kShapes[] = {0.1, 0.5, 1, 1.5, 2, 7.25, 100, 39201};

class GammaMoments : public testing::TestWithParam<double> {};

TEST_P(GammaMoments, MeanAndVariance) {
  const double shape = GetParam();
  double sum = 0;
  double squares = 0;
  for (const double x : Draws(shape)) {
    sum += x - shape;
    squares += (x - shape) * (x - shape);
  }
  // E(x - a)^2 = a and Var((x - a)^2) = 2 a^2 + 6 a.
  EXPECT_LT(std::abs(sum / std::sqrt(kDraws * shape)), kMaxZ);
  EXPECT_LT(std::abs((squares - kDraws * shape) /
                     std::sqrt(kDraws * (2 * shape * shape + 6 * shape))),
            kMaxZ);
}

// ln x has mean digamma(a): sensitive to the lower tail, where the moments of x
// see nothing.
TEST_P(GammaMoments, MeanLogarithm) {
  const double shape = GetParam();
  double sum = 0;
  double squares = 0;
  for (const double x : Draws(shape)) {
    ASSERT_GT(x, 0);
    sum += std::log(x);
    squares += std::log(x) * std::log(x);
  }
  // By the recurrence psi(a) = psi(a + 1) - 1 / a and the asymptotic series.
  double digamma = 0;
  double a = shape;
  for (; a < 20; ++a) digamma -= 1 / a;
  const double r = 1 / (a * a);
  digamma += std::log(a) - 0.5 / a - r * (1.0 / 12 - r * (1.0 / 120 - r / 252));
  const double mean = sum / kDraws;
  const double error = std::sqrt((squares / kDraws - mean * mean) / kDraws);
  EXPECT_LT(std::abs(mean - digamma) / error, kMaxZ);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GammaMoments, testing::ValuesIn(kShapes));

// Shapes whose distribution function is elementary.
double Cdf(double shape, double x) {
  if (shape == 0.5) return std::erf(std::sqrt(x));
  if (shape == 1) return -std::expm1(-x);
  if (shape == 1.5) {
    return std::erf(std::sqrt(x)) - 2 * std::sqrt(x / M_PI) * std::exp(-x);
  }
  if (shape == 3) return 1 - std::exp(-x) * (1 + x + x * x / 2);
  throw std::logic_error("no formula for this shape");
}

class GammaDistribution : public testing::TestWithParam<double> {};

TEST_P(GammaDistribution, KolmogorovSmirnov) {
  std::vector<double> x = Draws(GetParam());
  for (double& each : x) each = Cdf(GetParam(), each);
  EXPECT_LT(Kolmogorov(x), kMaxKolmogorov);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GammaDistribution,
                         testing::Values(0.5, 1, 1.5, 3));

TEST(Gamma, EveryArgumentMatters) {
  std::set<double> seen;
  int draws = 0;
  for (const uint64_t seed : {0, 1}) {
    for (const uint64_t step : {0, 1}) {
      for (const uint32_t purpose : {1, 2}) {
        for (const uint64_t element : {0, 1}) {
          seen.insert(DrawGamma(2, {seed, step, purpose}, element));
          ++draws;
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(draws));
}

// Neighbouring elements use neighbouring counters; their draws are unrelated.
TEST(Gamma, NeighboursAreUncorrelated) {
  constexpr double kShape = 2;
  const std::vector<double> x = Draws(kShape);
  double sum = 0;
  for (size_t i = 1; i < x.size(); ++i) {
    sum += (x[i] - kShape) * (x[i - 1] - kShape);
  }
  EXPECT_LT(std::abs(sum) / (kShape * std::sqrt(kDraws - 1)), kMaxZ);
}

TEST(Gamma, RejectsInvalidShapes) {
  for (const double shape :
       {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    EXPECT_THROW(DrawGamma(shape, Stream(0, 0), 0), std::invalid_argument);
  }
  try {
    DrawGamma(-1, Stream(0, 0), 0);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(),
                 "Invalid shape: -1.000000 (must be finite and > 0)");
  }
}

}  // namespace
}  // namespace torch_sgmcmc
