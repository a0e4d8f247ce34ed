// Minibatches: uniform, independent; and what is refused.
#include "host/minibatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/counter.h"
#include "message_of.h"
#include "statistics.h"

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

// Every ordered sample is equally likely: 5 * 4 * 3 of them.
TEST(Minibatches, WithoutReplacementAreUniform) {
  std::map<Indices, size_t> numbers;
  std::vector<double> counts(60);
  const Indices all = DrawMinibatches(5, 3, 60000, false, Stream(5, 0));
  for (size_t k = 0; k < all.size(); k += 3) {
    const Indices batch(all.begin() + static_cast<int64_t>(k),
                        all.begin() + static_cast<int64_t>(k) + 3);
    const std::set<int64_t> different(batch.begin(), batch.end());
    ASSERT_EQ(different.size(), 3U);
    ASSERT_GE(*different.begin(), 0);
    ASSERT_LT(*different.rbegin(), 5);
    const size_t number = numbers.emplace(batch, numbers.size()).first->second;
    ++counts[number];
  }
  EXPECT_EQ(numbers.size(), 60U);
  EXPECT_LT(ZOfEqualCounts(counts), kMaxZ);
}

TEST(Minibatches, WithReplacementAreUniform) {
  std::vector<double> counts(4 * 4 * 4);
  const Indices all = DrawMinibatches(4, 3, 60000, true, Stream(6, 0));
  for (size_t k = 0; k < all.size(); k += 3) {
    ++counts[static_cast<size_t>(16 * all[k] + 4 * all[k + 1] + all[k + 2])];
  }
  EXPECT_LT(ZOfEqualCounts(counts), kMaxZ);
  const Indices more = DrawMinibatches(2, 5, 1, true, Stream(6, 0));
  EXPECT_EQ(more.size(), 5U);
}

// Consecutive minibatches know nothing of each other: all pairs of them are
// equally likely. (Dealt from one shuffle, half the pairs would not occur.)
TEST(Minibatches, AreIndependent) {
  std::vector<double> counts(6 * 6);
  std::map<Indices, size_t> numbers;
  const Indices all = DrawMinibatches(4, 2, 60001, false, Stream(7, 0));
  size_t last = 0;
  for (size_t k = 0; k < all.size(); k += 2) {
    Indices batch = {all[k], all[k + 1]};
    std::sort(batch.begin(), batch.end());
    const size_t number = numbers.emplace(batch, numbers.size()).first->second;
    if (k > 0) ++counts[6 * last + number];
    last = number;
  }
  EXPECT_EQ(numbers.size(), 6U);
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

// Of several minibatches, each rank has its places of every one.
TEST(Minibatches, SharesAreTheirPlaces) {
  constexpr int64_t kSize = 6;
  constexpr int64_t kCount = 5;
  for (const int64_t ranks : {1, 2, 3, 6}) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const Share share{ranks, rank};
      const auto check = [&](const Indices& whole, const Indices& part) {
        Indices expected;
        for (int64_t k = 0; k < kCount; ++k) {
          for (int64_t i = rank; i < kSize; i += ranks) {
            expected.push_back(whole[static_cast<size_t>(k * kSize + i)]);
          }
        }
        EXPECT_EQ(part, expected);
      };
      for (const bool replacement : {false, true}) {
        check(DrawMinibatches(40, kSize, kCount, replacement, Stream(1, 2)),
              DrawMinibatches(
                  40, kSize, kCount, replacement, Stream(1, 2), share));
      }
    }
  }
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
