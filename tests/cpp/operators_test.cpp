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
#include <tuple>
#include <utility>
#include <vector>

#include "apply/cpu.h"
#include "apply/reduce.h"
#include "call_of.h"
#include "host/index_chain.h"
#include "methods/control_variate.h"
#include "methods/ewsg.h"
#include "methods/gaussian.h"
#include "methods/gradient_variance.h"
#include "methods/hmc.h"
#include "methods/psgld.h"
#include "methods/sghmc.h"
#include "methods/sgld.h"
#include "methods/sgnht.h"
#include "tensors.h"

#if !defined(STABLE_TORCH_ERROR_CODE_CHECK)  // torch 2.11
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace torch_sgmcmc {
namespace {

// Calls an operator; returns its stack, in which results replace arguments.
template <class... T>
std::vector<StableIValue> Dispatch(const char* name,
                                   const std::tuple<T...>& arguments) {
  std::vector<StableIValue> stack = std::apply(
      [](const T&... a) {
        return std::vector<StableIValue>{torch::stable::detail::from(a)...};
      },
      arguments);
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return stack;
}

// Each test calls an operator, and the function behind it on copies.
class Operators : public testing::Test {
 protected:
  static std::vector<float> Some(float scale) {
    std::vector<float> x(1001);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = scale * (static_cast<float>(i % 37) - 18);
    }
    return x;
  }

  template <class... Vectors>
  static auto Lists(Vectors&... x) {
    return std::make_tuple(TensorList{View(x)}...);
  }

  // The same elements as seven chains.
  static Tensor Row(std::vector<float>& x) {
    return View(x.data(), {7, 143}, {143, 1});
  }
  template <class... Vectors>
  static auto Rows(Vectors&... x) {
    return std::make_tuple(TensorList{Row(x)}...);
  }

  template <class... T>
  auto SGLDArguments(double lr, const std::tuple<T...>& lists) const {
    return std::tuple_cat(lists,
                          std::make_tuple(TensorList{},
                                          lr,
                                          /*num_data=*/50.0,
                                          /*prior_precision=*/2.0,
                                          /*temperature=*/0.5,
                                          offsets_,
                                          /*seed=*/int64_t{3},
                                          /*step=*/int64_t{4},
                                          no_step_,
                                          /*prior_mean=*/0.25,
                                          no_means_,
                                          rows_,
                                          no_chains_));
  }

  auto GaussianArguments(std::vector<float>& out,
                         int64_t step,
                         std::optional<Tensor> device_step) const {
    return std::tuple_cat(Lists(out),
                          std::make_tuple(/*std=*/0.7,
                                          offsets_,
                                          /*seed=*/int64_t{3},
                                          step,
                                          /*purpose=*/int64_t{1},
                                          std::move(device_step),
                                          rows_,
                                          no_chains_));
  }

  std::vector<float> theta_ = Some(0.1f), theta2_ = theta_;
  std::vector<float> v_ = Some(0.01f), v2_ = v_;
  std::vector<float> grad_ = Some(-0.3f);
  std::vector<float> variance_ = std::vector<float>(1001, 0.01f);
  const std::vector<float> before_ = theta_;
  const std::vector<int64_t> offsets_ = {128};
  const std::optional<Tensor> no_step_ = std::nullopt;
  std::vector<float> mean_ = Some(0.4f);
  const std::optional<TensorList> means_ = TensorList{View(mean_)};
  const std::optional<TensorList> no_means_ = std::nullopt;
  // As if the parameter were columns of a larger one.
  const std::optional<std::vector<int64_t>> rows_ =
      std::vector<int64_t>{143, 150};
  const int64_t no_chains_ = 0;
};

TEST_F(Operators, SGLDStep) {
  Dispatch("torch_sgmcmc::sgld_step_",
           SGLDArguments(0.1, Lists(theta_, grad_)));
  std::apply(On<SGLDStep, CpuDriver>(),
             SGLDArguments(0.1, Lists(theta2_, grad_)));
  EXPECT_EQ(theta_, theta2_);
  EXPECT_NE(theta_, before_);
}

TEST_F(Operators, SGHMCStep) {
  const auto rest = std::make_tuple(/*masters=*/TensorList{},
                                    /*lr=*/0.1,
                                    /*momentum=*/0.9,
                                    /*num_data=*/5.0,
                                    /*prior_precision=*/2.0,
                                    /*temperature=*/0.5,
                                    /*noise_estimate=*/0.01,
                                    /*resample_momentum_every=*/int64_t{2},
                                    offsets_,
                                    /*seed=*/int64_t{3},
                                    /*step=*/int64_t{4},
                                    no_step_,
                                    /*prior_mean=*/0.0,
                                    means_,
                                    rows_,
                                    no_chains_);
  Dispatch("torch_sgmcmc::sghmc_step_",
           std::tuple_cat(Lists(theta_, grad_, v_, variance_), rest));
  std::apply(On<SGHMCStep, CpuDriver>(),
             std::tuple_cat(Lists(theta2_, grad_, v2_, variance_), rest));
  EXPECT_EQ(theta_, theta2_);
  EXPECT_EQ(v_, v2_);
  EXPECT_NE(theta_, before_);
}

TEST_F(Operators, SGHMCByCoordinateStep) {
  const auto rest = std::make_tuple(/*masters=*/TensorList{},
                                    /*lr=*/0.1,
                                    /*momentum=*/0.9,
                                    /*num_data=*/5.0,
                                    /*prior_precision=*/2.0,
                                    /*temperature=*/0.5,
                                    /*noise_estimate=*/0.01,
                                    /*resample_momentum_every=*/int64_t{2},
                                    offsets_,
                                    /*seed=*/int64_t{3},
                                    /*step=*/int64_t{4},
                                    no_step_,
                                    /*prior_mean=*/0.0,
                                    means_,
                                    rows_,
                                    no_chains_);
  std::vector<float> mass(theta_.size(), 1.5F);
  std::vector<float> friction(theta_.size(), 2.5F);
  Dispatch("torch_sgmcmc::sghmc_by_coordinate_step_",
           std::tuple_cat(Lists(theta_, grad_, v_, variance_, mass, friction),
                          rest));
  std::apply(On<SGHMCByCoordinateStep, CpuDriver>(),
             std::tuple_cat(
                 Lists(theta2_, grad_, v2_, variance_, mass, friction), rest));
  EXPECT_EQ(theta_, theta2_);
  EXPECT_EQ(v_, v2_);
  EXPECT_NE(theta_, before_);
}

TEST_F(Operators, PSGLDStep) {
  std::vector<float> square = variance_, square2 = variance_;
  const auto rest = std::make_tuple(/*masters=*/TensorList{},
                                    /*lr=*/0.1,
                                    /*num_data=*/5.0,
                                    /*prior_precision=*/2.0,
                                    /*temperature=*/0.5,
                                    /*decay=*/0.9,
                                    /*eps=*/0.01,
                                    offsets_,
                                    /*seed=*/int64_t{3},
                                    /*step=*/int64_t{4},
                                    no_step_,
                                    /*prior_mean=*/0.0,
                                    means_,
                                    rows_,
                                    no_chains_);
  Dispatch("torch_sgmcmc::psgld_step_",
           std::tuple_cat(Lists(theta_, grad_, square, v_, grad_), rest));
  std::apply(On<PSGLDStep, CpuDriver>(),
             std::tuple_cat(Lists(theta2_, grad_, square2, v2_, grad_), rest));
  EXPECT_EQ(theta_, theta2_);
  EXPECT_EQ(v_, v2_);
  EXPECT_EQ(square, square2);
  EXPECT_NE(square, variance_);
  EXPECT_NE(theta_, before_);
}

TEST_F(Operators, SGNHTStep) {
  std::vector<float> thermostat = Some(1e-3f), thermostat2 = thermostat;
  const auto rest = std::make_tuple(/*masters=*/TensorList{},
                                    /*lr=*/0.1,
                                    /*momentum=*/0.9,
                                    /*num_data=*/5.0,
                                    /*prior_precision=*/2.0,
                                    /*temperature=*/0.5,
                                    /*thermostat_rate=*/0.01,
                                    offsets_,
                                    /*seed=*/int64_t{3},
                                    /*step=*/int64_t{4},
                                    no_step_,
                                    /*prior_mean=*/0.0,
                                    means_,
                                    rows_,
                                    no_chains_);
  Dispatch("torch_sgmcmc::sgnht_step_",
           std::tuple_cat(Lists(theta_, grad_, v_, thermostat), rest));
  std::apply(On<SGNHTStep, CpuDriver>(),
             std::tuple_cat(Lists(theta2_, grad_, v2_, thermostat2), rest));
  EXPECT_EQ(theta_, theta2_);
  EXPECT_EQ(v_, v2_);
  EXPECT_EQ(thermostat, thermostat2);
  EXPECT_NE(thermostat, Some(1e-3f));
  EXPECT_NE(theta_, before_);
}

TEST_F(Operators, HMC) {
  std::vector<float> mass(1001, 2.5f);
  const auto draw = std::make_tuple(/*temperature=*/0.5,
                                    offsets_,
                                    /*seed=*/int64_t{3},
                                    /*step=*/int64_t{4},
                                    rows_);
  Dispatch("torch_sgmcmc::hmc_momenta_", std::tuple_cat(Lists(v_, mass), draw));
  std::apply(On<HMCMomenta, CpuDriver>(),
             std::tuple_cat(Lists(v2_, mass), draw));
  EXPECT_EQ(v_, v2_);
  EXPECT_NE(v_, Some(0.01f));
  const auto move = std::make_tuple(/*masters=*/TensorList{},
                                    /*kick=*/0.1,
                                    /*drift=*/0.2,
                                    /*num_data=*/50.0,
                                    /*prior_precision=*/2.0,
                                    /*prior_mean=*/0.0,
                                    means_);
  Dispatch("torch_sgmcmc::hmc_leapfrog_",
           std::tuple_cat(Lists(theta_, grad_, v_, mass), move));
  std::apply(On<HMCLeapfrog, CpuDriver>(),
             std::tuple_cat(Lists(theta2_, grad_, v2_, mass), move));
  EXPECT_EQ(theta_, theta2_);
  EXPECT_EQ(v_, v2_);
  EXPECT_NE(theta_, before_);

  const std::vector<StableIValue> stack =
      Dispatch("torch_sgmcmc::hmc_energy",
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

TEST_F(Operators, GradientVariance) {
  std::vector<float> previous = Some(0.2f), previous2 = previous;
  std::vector<float> variance2 = variance_;
  const auto weight = std::make_tuple(0.05);
  Dispatch("torch_sgmcmc::gradient_variance_",
           std::tuple_cat(Lists(grad_, variance_, previous), weight));
  std::apply(On<GradientVarianceStep, CpuDriver>(),
             std::tuple_cat(Lists(grad_, variance2, previous2), weight));
  EXPECT_EQ(variance_, variance2);
  EXPECT_EQ(previous, grad_);
  EXPECT_EQ(previous2, grad_);
}

TEST_F(Operators, ControlVariate) {
  std::vector<float> grad = grad_, grad2 = grad_;
  std::vector<float> anchor = Some(0.2f), full = Some(0.7f);
  Dispatch("torch_sgmcmc::control_variate_", Lists(grad, anchor, full));
  std::apply(On<ControlVariate, CpuDriver>(), Lists(grad2, anchor, full));
  EXPECT_EQ(grad, grad2);
  for (size_t i = 0; i < grad.size(); ++i) {
    EXPECT_EQ(grad[i], (grad_[i] - anchor[i]) + full[i]);
  }
}

TEST_F(Operators, Gaussian) {
  Dispatch("torch_sgmcmc::gaussian_", GaussianArguments(theta_, 4, no_step_));
  std::apply(On<Gaussian, CpuDriver>(),
             GaussianArguments(theta2_, 4, no_step_));
  EXPECT_EQ(theta_, theta2_);
  EXPECT_NE(theta_, before_);
}

TEST_F(Operators, DeviceStepIsAddedToStep) {
  std::vector<int64_t> step = {3};
  Dispatch("torch_sgmcmc::gaussian_", GaussianArguments(theta_, 1, View(step)));
  std::apply(On<Gaussian, CpuDriver>(),
             GaussianArguments(theta2_, 4, no_step_));
  EXPECT_EQ(theta_, theta2_);
}

TEST_F(Operators, SumOfSquares) {
  const std::vector<StableIValue> stack =
      Dispatch("torch_sgmcmc::sum_of_squares",
               std::make_tuple(TensorList{View(theta_), View(v_)}));
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

TEST_F(Operators, EWSGLogRatio) {
  const auto rest = std::make_tuple(/*lr=*/0.1,
                                    /*momentum=*/0.9,
                                    /*num_data=*/5.0,
                                    /*prior_precision=*/2.0,
                                    /*temperature=*/0.5,
                                    /*surrogate=*/int64_t{3},
                                    /*num_chains=*/int64_t{7},
                                    /*prior_mean=*/0.25,
                                    no_means_);
  std::vector<float> proposal = Some(0.2f);
  const std::vector<StableIValue> stack =
      Dispatch("torch_sgmcmc::ewsg_log_ratio",
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
  ReduceOnCpu(plan.segments(),
              torch_sgmcmc::EWSGLogRatio<true, true>(EWSGCoefficients(
                  0.1, 0.9, 5, 2, 0.5, Surrogate::kFullMomentum, 0.25)),
              7,
              expected);
  for (int k = 0; k < 7; ++k) {
    EXPECT_EQ(static_cast<const double*>(result.data_ptr())[k], expected[k]);
  }
}

TEST_F(Operators, MetropolisDecideAndSelect) {
  std::vector<double> ratios = {-0.5, 0.5, -1, std::nan(""), -0.1, -2, -0.7};
  const std::vector<StableIValue> stack =
      Dispatch("torch_sgmcmc::metropolis_decide",
               std::make_tuple(View(ratios),
                               int64_t{2},
                               static_cast<int64_t>(Purpose::kIndexChain),
                               int64_t{3},
                               int64_t{4}));
  const Tensor accepted = torch::stable::detail::to<Tensor>(stack[0]);
  ASSERT_EQ(accepted.scalar_type(), ScalarType::Bool);
  const bool* yes = static_cast<const bool*>(accepted.data_ptr());
  Dispatch("torch_sgmcmc::select_chains_",
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

TEST_F(Operators, ErrorsLeaveTensorsAsTheyWere) {
  const char* name = "torch_sgmcmc::sgld_step_";
  EXPECT_THROW(Dispatch(name, SGLDArguments(-0.1, Lists(theta_, grad_))),
               std::exception);
  const auto no_grads = std::make_tuple(TensorList{View(theta_)}, TensorList{});
  EXPECT_THROW(Dispatch(name, SGLDArguments(0.1, no_grads)), std::exception);
  EXPECT_EQ(theta_, before_);
}

}  // namespace
}  // namespace torch_sgmcmc
