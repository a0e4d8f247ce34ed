// Plans: which memory is worked on. What is read from any layout and copied
// back where: tests/operators/test_layouts.py. Every message for what cannot
// be: test_operator_errors.py.
#include "launch/plan.h"

#include <mutex>
#include <numeric>
#include <thread>

#include "launch/parallel.h"
#include "tensors.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

Plan MakePlan(const TensorList& params, const TensorList& grads,
              const std::vector<int64_t>& offsets) {
  return Plan(
      "op",
      {{"params", Role::kInPlace, params}, {"grads", Role::kGradient, grads}},
      offsets);
}

std::vector<float> Iota(int64_t count) {
  std::vector<float> result(static_cast<size_t>(count));
  std::iota(result.begin(), result.end(), 1.0f);
  return result;
}

TEST(Plan, ContiguousTensorsAreUsedInPlace) {
  std::vector<float> p = Iota(6), g = Iota(6);
  const Plan plan = MakePlan({View(p.data(), {2, 3}, {3, 1})},
                             {View(g.data(), {2, 3}, {3, 1})}, {256});
  ASSERT_EQ(plan.segments().size(), 1u);
  const Segment& s = plan.segments()[0];
  EXPECT_EQ(s.data[0], p.data());
  EXPECT_EQ(s.data[1], g.data());
  EXPECT_EQ(s.numel, 6);
  EXPECT_EQ(s.offset, 256u);
  EXPECT_EQ(s.dtype, ScalarType::Float);
  EXPECT_FALSE(plan.on_cuda());
}

TEST(Plan, StridesOfASingleElementDoNotMatter) {
  std::vector<float> p = Iota(60), g = p;
  Plan plan = MakePlan({View(p.data(), {3, 1, 4, 5}, {20, 777, 5, 1})},
                       {View(g.data(), {3, 1, 4, 5}, {20, 777, 5, 1})}, {0});
  EXPECT_EQ(plan.segments()[0].data[0], p.data());
  EXPECT_EQ(plan.segments()[0].data[1], g.data());
}

TEST(Plan, StateOfHalfPrecisionParametersIsInFloat) {
  std::vector<BFloat16> p(6);
  std::vector<float> v = Iota(6);
  const TensorList params = {View(p.data(), {2, 3}, {3, 1})};
  const TensorList momenta = {View(v.data(), {2, 3}, {1, 2})};
  const auto make = [&] {
    return Plan("op",
                {{"params", Role::kInPlace, params},
                 {"momenta", Role::kState, momenta}},
                {0});
  };
  Plan plan = make();
  const Segment& s = plan.segments()[0];
  EXPECT_EQ(s.dtype, ScalarType::BFloat16);
  float* work = static_cast<float*>(s.data[1]);
  const float expected[] = {1, 3, 5, 2, 4, 6};
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(work[i], expected[i]);
    work[i] *= 2;
  }
  const std::vector<Segment> alone = plan.ArithmeticArgument(1);
  EXPECT_EQ(alone[0].data[0], s.data[1]);
  EXPECT_EQ(alone[0].dtype, ScalarType::Float);
  plan.Finish();
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(v[i], 2 * static_cast<float>(i + 1));
  }
}

TEST(Plan, MastersBelongToHalfPrecisionParametersAlone) {
  std::vector<float> p = Iota(2), none = Iota(1), a = Iota(3), b = Iota(4);
  std::vector<BFloat16> q(3);
  std::vector<Half> r(4), empty(1);
  const TensorList params = {View(p), View(q), View(empty.data(), {0}, {1}),
                             View(r)};
  TensorList masters = {View(a), View(none.data(), {0}, {1}), View(b)};
  const auto make = [&] {
    return Plan("op",
                {{"params", Role::kParameter, params},
                 {"masters", Role::kMaster, masters}},
                {0, 128, 256, 384});
  };
  const Plan plan = make();
  ASSERT_EQ(plan.segments().size(), 3u);
  EXPECT_EQ(plan.segments()[0].data[kMasters], nullptr);
  EXPECT_EQ(plan.segments()[1].data[kMasters], a.data());
  EXPECT_EQ(plan.segments()[2].data[kMasters], b.data());
  EXPECT_EQ(plan.segments()[2].data[1], nullptr);
}

TEST(DeviceStep, IsReadInPlace) {
  std::vector<float> x = Iota(1);
  std::vector<int64_t> step = {41, 42};
  const Plan plan = MakePlan({View(x)}, {View(x)}, {0});
  EXPECT_EQ(DeviceStep("op", plan, std::nullopt), nullptr);
  EXPECT_EQ(DeviceStep("op", plan, View(step.data(), {}, {})), step.data());
}

// The cutting of work into stretches, and that threads really share it.

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
