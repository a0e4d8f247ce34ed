// Minibatches: numbers below a bound, extreme sizes, and what is refused. That
// they are uniform, independent and shared by ranks:
// tests/posterior/test_data.py.
#include "host/minibatch.h"

#include "random/counter.h"
#include "statistics.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

using Indices = std::vector<int64_t>;

NoiseStream Stream(uint64_t seed, uint64_t step) {
  return {seed, step, static_cast<uint32_t>(Purpose::kMinibatch)};
}

// The z-score of a chi-square test of equal probabilities, by the cube-root
// normal approximation (Wilson and Hilferty).
double ZOfEqualCounts(const std::vector<double>& counts) {
  double total = 0;
  for (const double c : counts) total += c;
  const double expected = total / static_cast<double>(counts.size());
  double chi_square = 0;
  for (const double c : counts) {
    chi_square += (c - expected) * (c - expected) / expected;
  }
  const double k = static_cast<double>(counts.size()) - 1;
  const double v = 2 / (9 * k);
  return (std::cbrt(chi_square / k) - (1 - v)) / std::sqrt(v);
}

TEST(DrawBelow, IsUniform) {
  for (const uint64_t bound : {1, 2, 3, 7, 10, 48}) {
    std::vector<double> counts(bound);
    for (uint64_t i = 0; i < 100000; ++i) {
      const uint64_t x = DrawBelow(bound, Stream(1, 2), i);
      ASSERT_LT(x, bound);
      ++counts[x];
    }
    if (bound > 1) {
      EXPECT_LT(ZOfEqualCounts(counts), kMaxZ) << bound;
    }
  }
}

// Bounds of 3/4 of the range: without rejection the lower third of the numbers
// would be twice as likely as the rest.
TEST(DrawBelow, HasNoBiasForHugeBounds) {
  constexpr uint64_t kBound = uint64_t{3} << 62;
  std::vector<double> counts(3);
  for (uint64_t i = 0; i < 100000; ++i) {
    const uint64_t x = DrawBelow(kBound, Stream(3, 4), i);
    ASSERT_LT(x, kBound);
    ++counts[x >> 62];
  }
  EXPECT_LT(ZOfEqualCounts(counts), kMaxZ);
}

TEST(Minibatches, OfAllDataAreShuffles) {
  for (uint64_t step = 0; step < 50; ++step) {
    Indices batch = DrawMinibatches(100, 100, 1, false, Stream(8, step));
    EXPECT_FALSE(std::is_sorted(batch.begin(), batch.end()));
    std::sort(batch.begin(), batch.end());
    for (int64_t i = 0; i < 100; ++i) {
      EXPECT_EQ(batch[static_cast<size_t>(i)], i);
    }
  }
}

// Neither memory nor time for the data themselves.
TEST(Minibatches, OfAstronomicalData) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const Indices batch = DrawMinibatches(kMost, 1000, 1, false, Stream(9, 0));
  double mean = 0;
  for (const int64_t x : batch) {
    ASSERT_GE(x, 0);
    mean += static_cast<double>(x) / static_cast<double>(kMost) / 1000;
  }
  EXPECT_LT(std::abs(mean - 0.5) * std::sqrt(12 * 1000.0), kMaxZ);
}

TEST(Minibatches, ArePureFunctionsOfTheStep) {
  const Indices together = DrawMinibatches(40, 6, 5, false, Stream(1, 2));
  std::set<Indices> seen;
  for (uint64_t k = 0; k < 5; ++k) {
    const auto begin = static_cast<int64_t>(6 * k);
    const Indices one = DrawMinibatches(40, 6, 1, false, Stream(1, 2 + k));
    EXPECT_TRUE(std::equal(one.begin(), one.end(), together.begin() + begin));
    seen.insert(one);
  }
  seen.insert(DrawMinibatches(40, 6, 1, false, Stream(2, 2)));
  seen.insert(DrawMinibatches(40, 6, 1, false, {1, 2, 0}));
  EXPECT_EQ(seen.size(), 7U);
}

void ExpectInvalid(const std::function<void()>& call,
                   const std::string& message) {
  EXPECT_EQ(MessageOf<std::invalid_argument>(call), message);
}

TEST(Minibatches, RefuseWhatDoesNotFit) {
  const NoiseStream s = Stream(0, 0);
  ExpectInvalid([&] { DrawMinibatches(0, 1, 1, false, s); },
                "Invalid num_data: 0 (must be >= 1)");
  ExpectInvalid([&] { DrawMinibatches(5, 6, 1, false, s); },
                "Invalid batch_size: 6 (must be in [1, 5])");
  ExpectInvalid([&] { DrawMinibatches(5, 0, 1, true, s); },
                "Invalid batch_size: 0 (must be >= 1)");
  ExpectInvalid([&] { DrawMinibatches(5, 1, -1, true, s); },
                "Invalid count: -1 (must be >= 0)");
  ExpectInvalid(
      [&] { DrawMinibatches(5, 1, 2, true, Stream(0, uint64_t{kMaxStep})); },
      "step + count must be in [0, 2^48]");
  EXPECT_EQ(DrawMinibatches(5, 1, 1, true, Stream(0, kMaxStep)).size(), 1U);
}

}  // namespace
}  // namespace torch_sgmcmc
