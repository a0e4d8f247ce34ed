// The operators as any program finds them: by name in torch's dispatcher, in
// the shared library. Their arithmetic is tested elsewhere; what is tested here
// is that they are registered, take their arguments in the schema's order, and
// that errors come through.
#include <gtest/gtest.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "apply/cpu.h"
#include "apply/reduce.h"
#include "host/index_chain.h"
#include "methods/ewsg.h"
#include "row_calls.h"
#include "tensors.h"

namespace torch_sgmcmc {
namespace {

class OperatorsThatSum : public testing::Test {
 protected:
  static std::vector<float> Some(float scale) {
    std::vector<float> x(1001);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = scale * (static_cast<float>(i % 37) - 18);
    }
    return x;
  }

  // As seven chains.
  static Tensor Row(std::vector<float>& x) {
    return View(x.data(), {7, 143}, {143, 1});
  }
  template <class... Vectors>
  static auto Rows(Vectors&... x) {
    return std::make_tuple(TensorList{Row(x)}...);
  }

  std::vector<float> theta_ = Some(0.1f);
  std::vector<float> v_ = Some(0.01f);
  std::vector<float> grad_ = Some(-0.3f);
  const std::vector<float> before_ = theta_;
  const std::optional<TensorList> no_means_ = std::nullopt;
};

TEST_F(OperatorsThatSum, HMCEnergy) {
  std::vector<float> mass(1001, 2.5f);
  const std::vector<StableIValue> stack =
      Dispatch("hmc_energy",
               std::tuple_cat(Rows(theta_, v_, mass),
                              std::make_tuple(/*prior_precision=*/2.0,
                                              /*num_chains=*/int64_t{7},
                                              /*prior_mean=*/0.25,
                                              no_means_)));
  const Tensor result = torch::stable::detail::to<Tensor>(stack[0]);
  ASSERT_EQ(result.scalar_type(), ScalarType::Double);
  ASSERT_EQ(result.numel(), 7);
  for (size_t k = 0; k < 7; ++k) {
    double exact = 0;
    for (size_t i = k * 143; i < (k + 1) * 143; ++i) {
      const double x = theta_[i] - 0.25;
      const double r = v_[i];
      exact += x * x + r * r / 5;
    }
    EXPECT_NEAR(static_cast<const double*>(result.data_ptr())[k],
                exact,
                200 * 0x1p-53 * exact);
  }
}

TEST_F(OperatorsThatSum, SumOfSquares) {
  const std::vector<StableIValue> stack = Dispatch(
      "sum_of_squares", std::make_tuple(TensorList{View(theta_), View(v_)}));
  const Tensor result = torch::stable::detail::to<Tensor>(stack[0]);
  EXPECT_EQ(result.scalar_type(), ScalarType::Double);
  EXPECT_EQ(result.dim(), 0);
  double exact = 0;
  for (const float x : theta_) exact += static_cast<double>(x) * x;
  for (const float x : v_) exact += static_cast<double>(x) * x;
  EXPECT_NEAR(*static_cast<const double*>(result.data_ptr()),
              exact,
              2002 * 0x1p-53 * exact);
}

TEST_F(OperatorsThatSum, EWSGLogRatio) {
  const auto rest = std::make_tuple(/*lr=*/0.1,
                                    /*momentum=*/0.9,
                                    /*num_data=*/5.0,
                                    /*prior_precision=*/2.0,
                                    /*temperature=*/0.5,
                                    /*momentum_scale=*/1.0,
                                    /*surrogate=*/int64_t{3},
                                    /*num_chains=*/int64_t{7},
                                    /*prior_mean=*/0.25,
                                    no_means_);
  std::vector<float> proposal = Some(0.2f);
  const std::vector<StableIValue> stack =
      Dispatch("ewsg_log_ratio",
               std::tuple_cat(Rows(theta_, grad_, proposal, v_), rest));
  const Tensor result = torch::stable::detail::to<Tensor>(stack[0]);
  ASSERT_EQ(result.scalar_type(), ScalarType::Double);
  ASSERT_EQ(result.numel(), 7);
  const Plan plan("test",
                  {{"params", Role::kGradient, {Row(theta_)}},
                   {"grads", Role::kGradient, {Row(grad_)}},
                   {"proposals", Role::kGradient, {Row(proposal)}},
                   {"momenta", Role::kStatistic, {Row(v_)}}},
                  {0});
  double expected[7];
  ReduceOnCpu(
      plan.segments(),
      torch_sgmcmc::EWSGLogRatio<EWSGPrior::kAboutMean, true>(EWSGCoefficients(
          0.1, 0.9, 5, 2, 0.5, 1, Surrogate::kFullMomentum, 0.25)),
      7,
      expected);
  for (int k = 0; k < 7; ++k) {
    EXPECT_EQ(static_cast<const double*>(result.data_ptr())[k], expected[k]);
  }
}

TEST_F(OperatorsThatSum, MetropolisDecideAndSelect) {
  std::vector<double> ratios = {-0.5, 0.5, -1, std::nan(""), -0.1, -2, -0.7};
  const std::vector<StableIValue> stack =
      Dispatch("metropolis_decide",
               std::make_tuple(View(ratios),
                               int64_t{2},
                               static_cast<int64_t>(Purpose::kIndexChain),
                               int64_t{3},
                               int64_t{4}));
  const Tensor accepted = torch::stable::detail::to<Tensor>(stack[0]);
  ASSERT_EQ(accepted.scalar_type(), ScalarType::Bool);
  const bool* yes = static_cast<const bool*>(accepted.data_ptr());
  Dispatch("select_chains_",
           std::tuple_cat(Rows(theta_, grad_), std::make_tuple(accepted)));
  const NoiseStream stream{3, 4, static_cast<uint32_t>(Purpose::kIndexChain)};
  for (uint64_t k = 0; k < 7; ++k) {
    EXPECT_EQ(yes[k], IndexChainAccepts(ratios[k], stream, k, 2));
    for (size_t i = k * 143; i < (k + 1) * 143; ++i) {
      ASSERT_EQ(theta_[i], yes[k] ? grad_[i] : before_[i]);
    }
  }
  EXPECT_TRUE(yes[1]);
  EXPECT_FALSE(yes[3]);
}

TEST(Operators, ErrorsLeaveTensorsAsTheyWere) {
  const State before(7);
  State after = before;
  Call negative = CallOf(SGLDStep::kRow, after, {});
  negative.numbers[0] = -0.1;
  EXPECT_THROW(Dispatch("sgld_step_", StackOf(negative)), std::exception);
  Call no_grads = CallOf(SGLDStep::kRow, after, {});
  no_grads.lists[1].clear();
  EXPECT_THROW(Dispatch("sgld_step_", StackOf(no_grads)), std::exception);
  EXPECT_TRUE(after == before);
}

}  // namespace
}  // namespace torch_sgmcmc
