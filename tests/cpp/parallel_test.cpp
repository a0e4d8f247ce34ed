// The cutting of work into stretches, and that threads really share it.
#include "launch/parallel.h"

#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

namespace torch_sgmcmc {
namespace {

std::vector<Segment> SegmentsOf(const std::vector<int64_t>& sizes) {
  std::vector<Segment> result;
  for (const int64_t numel : sizes) {
    Segment s{};
    s.numel = numel;
    result.push_back(s);
  }
  return result;
}

// With two threads (OMP_NUM_THREADS, set by ctest) and with one.
TEST(Parallel, CoversEverySegmentOnceAndCutsOnlyAtStretches) {
  const std::vector<std::vector<int64_t>> cases = {
      {},
      {1},
      {kStretch},
      {kStretch + 1},
      {78400, 100, 1000, 10},
      {1, 2, 3, 4, 5 * kStretch - 1, 1, kStretch, 7},
      std::vector<int64_t>(300, 17),
      {100 * kStretch + 3, 1},
  };
  for (const std::vector<int64_t>& sizes : cases) {
    const std::vector<Segment> segments = SegmentsOf(sizes);
    std::mutex mutex;
    std::set<std::tuple<size_t, int64_t, int64_t>> ranges;
    ParallelOverStretches(
        segments, [&](const Segment& s, int64_t begin, int64_t end) {
          const std::lock_guard<std::mutex> lock(mutex);
          ranges.emplace(static_cast<size_t>(&s - segments.data()), begin, end);
        });
    // In order, the ranges must tile each segment.
    size_t segment = 0;
    int64_t position = 0;
    for (const auto& [i, begin, end] : ranges) {
      EXPECT_EQ(begin % kStretch, 0);
      EXPECT_LT(begin, end);
      if (i != segment) {
        EXPECT_EQ(position, sizes[segment]);
        EXPECT_EQ(i, segment + 1);
        segment = i;
        position = 0;
      }
      EXPECT_EQ(begin, position);
      position = end;
    }
    if (!sizes.empty()) {
      EXPECT_EQ(segment, sizes.size() - 1);
      EXPECT_EQ(position, sizes.back());
    }
  }
}

TEST(Parallel, TwoThreadsAreAtWork) {
  if (torch::stable::get_num_threads() < 2) {
    GTEST_SKIP() << "torch was told to use one thread";
  }
  std::mutex mutex;
  std::set<std::thread::id> threads;
  ParallelOverStretches(SegmentsOf({100 * kStretch}),
                        [&](const Segment&, int64_t, int64_t) {
                          const std::lock_guard<std::mutex> lock(mutex);
                          threads.insert(std::this_thread::get_id());
                        });
  EXPECT_GE(threads.size(), 2u);
}

}  // namespace
}  // namespace torch_sgmcmc
