// Plans: which memory is worked on, and every message for what cannot be.
#include "apply/plan.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensors.h"

namespace torch_sgmcmc {
namespace {

void ExpectError(const std::function<void()>& action,
                 const std::string& message) {
  try {
    action();
    ADD_FAILURE() << "no error; expected: " << message;
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(error.what(), "torch_sgmcmc::op: " + message);
  }
}

Plan MakePlan(const TensorList& params,
              const TensorList& grads,
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
                             {View(g.data(), {2, 3}, {3, 1})},
                             {256});
  ASSERT_EQ(plan.segments().size(), 1u);
  const Segment& s = plan.segments()[0];
  EXPECT_EQ(s.data[0], p.data());
  EXPECT_EQ(s.data[1], g.data());
  EXPECT_EQ(s.numel, 6);
  EXPECT_EQ(s.offset, 256u);
  EXPECT_EQ(s.dtype, ScalarType::Float);
  EXPECT_FALSE(plan.on_cuda());
}

TEST(Plan, ScalarsAreSegmentsAndEmptyTensorsAreNot) {
  std::vector<float> p = {3}, g = {4};
  const Plan plan = MakePlan({View(p.data(), {0}, {1}),
                              View(p.data(), {}, {}),
                              View(p.data(), {2, 0}, {1, 1})},
                             {View(g.data(), {0}, {1}),
                              View(g.data(), {}, {}),
                              View(g.data(), {2, 0}, {1, 1})},
                             {0, 128, 256});
  ASSERT_EQ(plan.segments().size(), 1u);
  EXPECT_EQ(plan.segments()[0].numel, 1);
  EXPECT_EQ(plan.segments()[0].offset, 128u);
}

TEST(Plan, DenseTensorsOfAnyMemoryFormatAreUsedInPlace) {
  std::vector<float> p = Iota(2 * 3 * 4 * 5), g = p;
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>>
      layouts = {
          {{4, 5}, {1, 4}},                 // transposed
          {{2, 3, 4, 5}, {60, 1, 15, 3}},   // channels last
          {{3, 1, 4, 5}, {20, 777, 5, 1}},  // size 1: any stride
          {{5, 4, 3, 2}, {24, 1, 8, 4}},
      };
  for (const auto& [sizes, strides] : layouts) {
    Plan plan = MakePlan({View(p.data(), sizes, strides)},
                         {View(g.data(), sizes, strides)},
                         {0});
    EXPECT_EQ(plan.segments()[0].data[0], p.data());
    EXPECT_EQ(plan.segments()[0].data[1], g.data());
  }
}

// Work in temporaries gets back to where it belongs, in the right order.
TEST(Plan, ParameterWithGapsGoesThroughACopy) {
  std::vector<float> p = Iota(12), g = Iota(6);
  const Tensor param = View(p.data(), {2, 3}, {6, 2});  // every other element
  Plan plan = MakePlan({param}, {View(g.data(), {2, 3}, {3, 1})}, {0});
  const Segment& s = plan.segments()[0];
  ASSERT_NE(s.data[0], p.data());
  EXPECT_EQ(s.data[1], g.data());
  float* work = static_cast<float*>(s.data[0]);
  const float expected[] = {1, 3, 5, 7, 9, 11};
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(work[i], expected[i]);
    work[i] += 100;
  }
  EXPECT_EQ(p, Iota(12));  // nothing is changed before Finish
  plan.Finish();
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(p[static_cast<size_t>(i)], i + 1 + (i % 2 == 0 ? 100 : 0));
  }
}

TEST(Plan, GradientInAnotherLayoutIsReordered) {
  std::vector<float> p = Iota(6), g = Iota(6);
  // The parameter's memory order is that of its transpose.
  Plan plan = MakePlan(
      {View(p.data(), {2, 3}, {1, 2})}, {View(g.data(), {2, 3}, {3, 1})}, {0});
  const Segment& s = plan.segments()[0];
  EXPECT_EQ(s.data[0], p.data());
  const float* work = static_cast<const float*>(s.data[1]);
  const float expected[] = {1, 4, 2, 5, 3, 6};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(work[i], expected[i]);
  plan.Finish();
  EXPECT_EQ(g, Iota(6));  // gradients are never written
}

TEST(Plan, ExpandedGradientIsReadAndExpandedParameterIsAnError) {
  std::vector<float> p = Iota(3), g = {7};
  const Plan plan = MakePlan({View(p)}, {View(g.data(), {3}, {0})}, {0});
  const float* work = static_cast<const float*>(plan.segments()[0].data[1]);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(work[i], 7);
  ExpectError(
      [&] { MakePlan({View(g.data(), {3}, {0})}, {View(p)}, {0}); },
      "params[0] is an expanded tensor (several elements share memory) and "
      "cannot be written");
}

TEST(Plan, StateOfHalfPrecisionParametersIsInFloat) {
  std::vector<BFloat16> p(6);
  std::vector<float> v = Iota(6);
  const TensorList params = {View(p.data(), {2, 3}, {1, 2})};
  TensorList momenta = {View(v.data(), {2, 3}, {3, 1})};
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
  const float expected[] = {1, 4, 2, 5, 3, 6};
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

  momenta = {View(p.data(), {2, 3}, {1, 2})};
  ExpectError(make,
              "momenta[0] has bfloat16, expected float32 (for params[0] in "
              "bfloat16)");
}

TEST(Plan, MastersBelongToHalfPrecisionParametersAlone) {
  std::vector<float> p = Iota(2), none = Iota(1), a = Iota(3), b = Iota(4);
  std::vector<BFloat16> q(3);
  std::vector<Half> r(4), empty(1);
  const TensorList params = {
      View(p), View(q), View(empty.data(), {0}, {1}), View(r)};
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

  std::swap(masters[0], masters[2]);
  ExpectError(make,
              "masters[0] has shape [4], expected [3] (that of params[1])");
  masters.pop_back();
  ExpectError(make,
              "masters has 2 tensors, expected 3 (one for each of params in "
              "bfloat16 or float16)");
}

TEST(Plan, MeansOfPriorsMayBeAbsent) {
  std::vector<float> p = Iota(3), mean = Iota(3);
  std::vector<BFloat16> q(3);
  const TensorList params = {View(p), View(q)};
  std::optional<TensorList> means;
  const auto make = [&] {
    return Plan("op",
                {{"params", Role::kParameter, params},
                 PriorMeans(means),
                 {"grads", Role::kGradient, params}},
                {0, 128});
  };
  for (int round = 0; round < 2; ++round) {
    const Plan plan = make();
    EXPECT_EQ(plan.segments()[0].data[kPriorMeans], nullptr);
    EXPECT_EQ(plan.segments()[0].data[2], p.data());
    means = TensorList();
  }
  means = TensorList{View(mean), View(mean)};
  const Plan plan = make();
  EXPECT_EQ(plan.segments()[0].data[kPriorMeans], mean.data());
  EXPECT_EQ(plan.segments()[1].data[kPriorMeans], mean.data());
  EXPECT_EQ(plan.segments()[0].data[1], nullptr);
  means = TensorList{View(mean), View(q)};
  ExpectError(make,
              "prior_means[1] has bfloat16, expected float32 (for params[1] in "
              "bfloat16)");
  means->pop_back();
  ExpectError(make,
              "prior_means has 1 tensors, expected 2 (as many as params)");
}

TEST(Plan, RejectsListsOfDifferentLengths) {
  std::vector<float> x = Iota(3);
  ExpectError(
      [&] {
        MakePlan({View(x), View(x)}, {View(x)}, {0, 0});
      },
      "grads has 1 tensors, expected 2 (as many as params)");
  ExpectError(
      [&] {
        MakePlan({View(x)}, {View(x)}, {0, 128});
      },
      "offsets has 2 entries, expected 1 (one for each tensor of "
      "params)");
}

TEST(Plan, RejectsWhatDoesNotFit) {
  std::vector<float> x = Iota(6);
  std::vector<double> d(6);
  std::vector<int64_t> n(6);
  ExpectError(
      [&] {
        MakePlan({View(x), View(n)}, {View(x), View(n)}, {0, 8});
      },
      "params[1] has int64, expected float32, float64, bfloat16 or "
      "float16");
  ExpectError([&] { MakePlan({View(x)}, {View(d)}, {0}); },
              "grads[0] has float64, expected float32 (for params[0] in "
              "float32)");
  ExpectError(
      [&] {
        MakePlan({View(x)}, {View(x.data(), {2, 3}, {3, 1})}, {0});
      },
      "grads[0] has shape [2, 3], expected [6] (that of params[0])");
  ExpectError([&] { MakePlan({View(x)}, {View(x)}, {-4}); },
              "Invalid offsets[0]: -4 (must be >= 0)");
}

TEST(MakeStream, ChecksItsArguments) {
  const NoiseStream s = MakeStream("op", -1, kMaxStep, kMaxPurpose);
  EXPECT_EQ(s.seed, ~uint64_t{0});
  EXPECT_EQ(s.step, static_cast<uint64_t>(kMaxStep));
  EXPECT_EQ(s.purpose, static_cast<uint32_t>(kMaxPurpose));
  ExpectError([] { MakeStream("op", 0, -1, 0); },
              "Invalid step: -1 (must be in [0, 2^48))");
  ExpectError([] { MakeStream("op", 0, kMaxStep + 1, 0); },
              "Invalid step: 281474976710656 (must be in [0, 2^48))");
  ExpectError([] { MakeStream("op", 0, 0, -1); },
              "Invalid purpose: -1 (must be in [0, 2^16))");
  ExpectError([] { MakeStream("op", 0, 0, kMaxPurpose + 1); },
              "Invalid purpose: 65536 (must be in [0, 2^16))");
}

TEST(DeviceStep, ChecksItsArguments) {
  std::vector<float> x = Iota(1);
  std::vector<int64_t> step = {41, 42};
  const Plan plan = MakePlan({View(x)}, {View(x)}, {0});
  EXPECT_EQ(DeviceStep("op", plan, std::nullopt), nullptr);
  EXPECT_EQ(DeviceStep("op", plan, View(step.data(), {}, {})), step.data());
  ExpectError([&] { DeviceStep("op", plan, View(step)); },
              "device_step must hold a single int64, got 2 elements of int64");
  ExpectError([&] { DeviceStep("op", plan, View(x)); },
              "device_step must hold a single int64, got 1 elements of "
              "float32");
}

TEST(Checks, NameTheNumber) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_NO_THROW(CheckNumber("op", "lr", 0));
  ExpectError([] { CheckNumber("op", "lr", -0.5); },
              "Invalid lr: -0.5 (must be finite and >= 0)");
  ExpectError([] { CheckNumber("op", "num_data", 0, {.low_open = true}); },
              "Invalid num_data: 0 (must be finite and > 0)");
  ExpectError([] { CheckNumber("op", "temperature", kInfinity); },
              "Invalid temperature: inf (must be finite and >= 0)");
  ExpectError(
      [] {
        CheckNumber("op",
                    "prior_mean",
                    -kInfinity,
                    {.low = -kInfinity, .low_open = true});
      },
      "Invalid prior_mean: -inf (must be finite)");
  EXPECT_NO_THROW(CheckNumber("op", "momentum", 0, {.high = 1}));
  ExpectError([] { CheckNumber("op", "momentum", 1, {.high = 1}); },
              "Invalid momentum: 1 (must be in [0, 1))");
  EXPECT_NO_THROW(CheckCount("op", "num_chains", 1, /*least=*/1));
  ExpectError([] { CheckCount("op", "num_chains", 0, /*least=*/1); },
              "Invalid num_chains: 0 (must be >= 1)");
}

}  // namespace
}  // namespace torch_sgmcmc
