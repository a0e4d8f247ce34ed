// HMC-ECS's subsamples: their laws, and what is refused.
#include "host/subsample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>
#include <vector>

#include "core/counter.h"
#include "statistics.h"

namespace torch_sgmcmc {
namespace {

TEST(DrawPoisson, HasItsLaw) {
  constexpr int kDraws = 100000;
  std::vector<double> counts(40);
  const NoiseStream stream{3, 5, static_cast<uint32_t>(Purpose::kPoisson)};
  for (int i = 0; i < kDraws; ++i) {
    ++counts[static_cast<size_t>(
        DrawPoisson(stream, static_cast<uint64_t>(i)))];
  }
  double p = std::exp(-1.0);
  for (size_t k = 0; k < 7; ++k) {
    EXPECT_LT(ZOfShare(counts[k], kDraws, p), kMaxZ) << k;
    p /= static_cast<double>(k + 1);
  }
}

TEST(Subsample, PartsCellsIntoBlocks) {
  const Subsample subsample(100, 13, 5, 1, false, 0);
  std::set<int64_t> sizes;
  for (int64_t b = 0; b < 5; ++b) {
    sizes.insert(subsample.Begin(b + 1) - subsample.Begin(b));
  }
  EXPECT_EQ(subsample.Begin(0), 0);
  EXPECT_EQ(subsample.Begin(5), 13);
  EXPECT_EQ(sizes, (std::set<int64_t>{2, 3}));
}

TEST(Subsample, DrawsUniformly) {
  const Subsample subsample(4, 10, 5, 1, false, 1);
  std::vector<double> data(4);
  std::vector<double> proposed(4);
  std::vector<double> blocks(5);
  constexpr int kSteps = 4000;
  for (uint64_t step = 0; step < kSteps; ++step) {
    const Cells all = subsample.Draw(step);
    ASSERT_EQ(all.counts, std::vector<int64_t>(10, 1));
    ASSERT_EQ(all.indices.size(), 10U);
    for (const int64_t i : all.indices) ++data.at(static_cast<size_t>(i));
    const BlockProposal proposal = subsample.Propose(step);
    ++blocks.at(static_cast<size_t>(proposal.block));
    ASSERT_EQ(proposal.cells.indices.size(), 2U);
    for (const int64_t i : proposal.cells.indices) {
      ++proposed.at(static_cast<size_t>(i));
    }
  }
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_LT(ZOfShare(data[i], kSteps * 10, 0.25), kMaxZ);
    EXPECT_LT(ZOfShare(proposed[i], kSteps * 2, 0.25), kMaxZ);
  }
  for (const double count : blocks) {
    EXPECT_LT(ZOfShare(count, kSteps, 0.2), kMaxZ);
  }
}

TEST(Subsample, HasPoissonNumbersOfMinibatches) {
  const Subsample subsample(50, 8, 2, 3, true, 9);
  double zeros = 0;
  constexpr int kSteps = 2000;
  for (uint64_t step = 0; step < kSteps; ++step) {
    for (const Cells& cells :
         {subsample.Draw(step), subsample.Propose(step).cells}) {
      int64_t sum = 0;
      for (const int64_t count : cells.counts) {
        sum += count;
        zeros += count == 0 ? 1 : 0;
      }
      ASSERT_EQ(cells.indices.size(), static_cast<size_t>(3 * sum));
    }
  }
  EXPECT_LT(ZOfShare(zeros, kSteps * 12, std::exp(-1.0)), kMaxZ);
}

TEST(Subsample, IsAPureFunction) {
  const Subsample a(1000, 50, 10, 2, true, 7);
  const Subsample b(1000, 50, 10, 2, true, 8);
  EXPECT_EQ(a.Draw(3).indices, a.Draw(3).indices);
  EXPECT_NE(a.Draw(3).indices, a.Draw(4).indices);
  EXPECT_NE(a.Draw(3).indices, b.Draw(3).indices);
  EXPECT_NE(a.Propose(3).cells.indices, b.Propose(3).cells.indices);
}

TEST(Subsample, ProposalsAreNotTheDrawOfTheSameStep) {
  const Subsample one(1000000, 20, 1, 1, false, 7);
  EXPECT_NE(one.Draw(3).indices, one.Propose(3).cells.indices);
}

TEST(Subsample, RefusesBadSizes) {
  EXPECT_THROW(Subsample(0, 1, 1, 1, false, 0), std::invalid_argument);
  EXPECT_THROW(Subsample(1, 0, 1, 1, false, 0), std::invalid_argument);
  EXPECT_THROW(Subsample(1, 1, 2, 1, false, 0), std::invalid_argument);
  EXPECT_THROW(Subsample(1, 1, 1, 0, false, 0), std::invalid_argument);
  EXPECT_THROW(Subsample(1, int64_t{1} << 27, 1, 1, false, 0),
               std::invalid_argument);
  const Subsample subsample(5, 1, 1, 1, false, 0);
  EXPECT_THROW(subsample.Draw(uint64_t{1} << 48), std::invalid_argument);
  EXPECT_THROW(subsample.Propose(uint64_t{1} << 48), std::invalid_argument);
}

}  // namespace
}  // namespace torch_sgmcmc
