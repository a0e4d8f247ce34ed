// The index chain's decisions: the logarithm, the uniforms, the probabilities.
#include "host/index_chain.h"

#include "statistics.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

constexpr int kDraws = 200000;

NoiseStream Stream(uint64_t seed, uint64_t step) {
  return {seed, step, static_cast<uint32_t>(Purpose::kIndexChain)};
}

void ExpectLog(double u) {
  const long double exact = std::log(static_cast<long double>(u));
  const double ulp = 0x1p-52 * static_cast<double>(std::abs(exact));
  EXPECT_NEAR(LogOfUniform(u), static_cast<double>(exact), 4 * ulp) << u;
  EXPECT_LT(LogOfUniform(u), 0);
}

TEST(IndexChain, LogarithmIsAccurate) {
  for (uint64_t k = 0; k < kDraws; ++k) {
    ExpectLog(IndexUniform(Stream(1, 2), k, 0));
  }
  // Every power of two, its neighbours, and those of the cuts at 2^e / sqrt 2.
  for (int e = -53; e < 0; ++e) {
    for (const double m : {1.0, std::sqrt(0.5), std::sqrt(2.0), 1.5}) {
      const double u = std::ldexp(m, e);
      ExpectLog(u);
      ExpectLog(std::nextafter(u, 0));
      if (u < 1) ExpectLog(std::nextafter(u, 1));
    }
  }
  ExpectLog(1 - 0x1p-53);  // the largest and the smallest uniform
  ExpectLog(0x1p-53);
}

TEST(IndexChain, UniformsAreUniform) {
  double sum = 0;
  double squares = 0;
  double neighbours = 0;
  double last = 0.5;
  for (uint64_t k = 0; k < kDraws; ++k) {
    const double u = IndexUniform(Stream(3, 4), k / 4, k % 4);
    ASSERT_GT(u, 0);
    ASSERT_LT(u, 1);
    sum += u - 0.5;
    squares += (u - 0.5) * (u - 0.5);
    neighbours += (u - 0.5) * (last - 0.5);
    last = u;
  }
  // Variances 1/12, 1/180 and 1/144.
  EXPECT_LT(std::abs(sum / std::sqrt(kDraws / 12.0)), kMaxZ);
  EXPECT_LT(std::abs((squares - kDraws / 12.0) / std::sqrt(kDraws / 180.0)),
            kMaxZ);
  EXPECT_LT(std::abs(neighbours / std::sqrt(kDraws / 144.0)), kMaxZ);
}

TEST(IndexChain, AcceptsWithTheRatioAsProbability) {
  for (const double ratio : {-0.01, -0.5, -1.0, -3.0, -7.0}) {
    int accepted = 0;
    for (uint64_t step = 0; step < kDraws; ++step) {
      accepted += IndexChainAccepts(ratio, Stream(5, step), 0, 1);
    }
    const double p = std::exp(ratio);
    EXPECT_LT(ZOfShare(accepted, kDraws, p), kMaxZ);
  }
}

TEST(IndexChain, RatiosOutOfTheOrdinary) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (uint64_t step = 0; step < 1000; ++step) {
    for (const double ratio : {0.0, -0.0, 1e-300, 5.0, kInfinity}) {
      EXPECT_TRUE(IndexChainAccepts(ratio, Stream(0, step), 0, 0));
    }
    for (const double ratio : {std::nan(""), -kInfinity, -37.0}) {
      EXPECT_FALSE(IndexChainAccepts(ratio, Stream(0, step), 0, 0));
    }
  }
}

TEST(IndexChain, EveryArgumentMatters) {
  std::set<double> seen;
  int draws = 0;
  for (const uint64_t seed : {0, 1}) {
    for (const uint64_t step : {0, 1}) {
      for (const uint32_t purpose : {0, 3}) {
        for (const uint64_t chain : {0, 1, 1 << 20}) {
          for (const uint64_t proposal : {0, 1, (1 << 24) - 1}) {
            seen.insert(IndexUniform({seed, step, purpose}, chain, proposal));
            ++draws;
          }
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(draws));
}

// Minibatches that are none.

TEST(ClosureWatch, CountsMinibatchesThatAreNone) {
  const auto after = [](std::optional<int64_t> before, bool equal, bool zero) {
    return EqualRunning(before, equal, zero, " (so)", "none");
  };
  EXPECT_EQ(after(0, true, false), 1);
  EXPECT_EQ(after(98, true, false), 99);
  EXPECT_EQ(after(99, true, true), 99);
  EXPECT_EQ(after(99, false, false), std::nullopt);
  EXPECT_EQ(after(std::nullopt, true, false), std::nullopt);
  try {
    after(99, true, false);
    FAIL();
  } catch (const std::runtime_error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("from 100 calls"), std::string::npos);
    EXPECT_NE(message.find("at each call (so). If each"), std::string::npos);
  }
}

}  // namespace
}  // namespace torch_sgmcmc
