// SGHMC in C++, beyond what tests/test_cpp_chains.py compares with Python.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "message_of.h"

namespace torch_sgmcmc {
namespace {

SGHMCOptions Given() {
  return SGHMCOptions(0.01).num_data(50).seed(5).noise_estimate("given");
}

std::vector<at::Tensor> Parameters() {
  std::vector<at::Tensor> params = {torch::zeros({2}, at::kDouble),
                                    torch::zeros({3}, at::kDouble)};
  for (at::Tensor& param : params) {
    param.requires_grad_(true);
    param.mutable_grad() = torch::ones_like(param);
  }
  return params;
}

std::string Refused(SGHMC& sampler, const at::Tensor& covariance) {
  return MessageOf<std::invalid_argument>(
      [&] { sampler.set_gradient_covariance(covariance); });
}

TEST(SGHMC, TakesVariances) {
  const std::vector<at::Tensor> params = Parameters();
  SGHMC sampler(params, Given());
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(); }),
            "SGHMC has no gradient variance for a parameter of shape [2]: call "
            "set_gradient_variance() before step(), with that of all "
            "parameters");
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] {
        sampler.set_gradient_variance({torch::ones({}), torch::full({}, -1)});
      }),
      "Invalid gradient variance: number 1 has elements out of range (must be "
      "finite and >= 0)");
  sampler.set_gradient_variance({torch::zeros({}), torch::ones({})});
  // β̂ = lr N V / (2T) = 0.25 V
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); }),
            "Invalid noise_estimate: 0.25 in the noisiest coordinate. No "
            "parameter has changed (must not exceed the friction 1 - momentum "
            "= 0.1: lower momentum or lr, or take larger minibatches)");
  EXPECT_TRUE(torch::equal(params[0], torch::zeros_like(params[0])));
  sampler.set_gradient_variance({torch::zeros({}), torch::full({}, 0.3)});
  sampler.step();
  StateDict saved = sampler.state_dict();
  const StateDict state = saved.at("state");
  const StateDict kept = state.at(1);
  kept.at("given_variance").toTensor().fill_(-1);
  SGHMC other(Parameters(), Given());
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { other.load_state_dict(saved); }),
      "Invalid state_dict: given_variance of parameter 1 has elements "
      "out of range (must be finite and >= 0)");
  sampler.set_gradient_variance(std::nullopt);
  const StateDict without = sampler.state_dict().at("state");
  const StateDict second = without.at(1);
  EXPECT_FALSE(second.contains("given_variance"));
}

TEST(SGHMC, TakesMasses) {
  const std::vector<at::Tensor> params = Parameters();
  SGHMC sampler(params, SGHMCOptions(0.01).num_data(50).seed(5));
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { sampler.set_mass({torch::ones({})}); }),
            "Invalid mass: 1 (must be one for each of the 2 parameters)");
  const std::vector<at::Tensor> ones(2, torch::ones({}));
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] {
              sampler.set_mass(ones, {torch::ones({}), torch::zeros({})});
            }),
            "Invalid friction: number 1 has elements out of range (must be "
            "finite and > 0)");
  sampler.set_mass(ones, {torch::ones({}), torch::full({}, 12)});
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); }),
            "Invalid momentum: 0.9, with which the largest friction (1 - "
            "momentum) C / M is 1.2. No parameter has changed (must not exceed "
            "1: raise momentum, or give more mass or less friction)");
  EXPECT_TRUE(torch::equal(params[0], torch::zeros_like(params[0])));
  sampler.set_mass({torch::ones({}), torch::full({}, 4)});
  sampler.step();
  const auto state_of = [](const SGHMC& of, int64_t index) -> StateDict {
    const StateDict state = of.state_dict().at("state");
    return state.at(index);
  };
  const at::Tensor before = state_of(sampler, 1).at("momentum").toTensor();
  sampler.set_mass(std::nullopt);
  const at::Tensor after = state_of(sampler, 1).at("momentum").toTensor();
  EXPECT_TRUE(torch::equal(after, 2 * before));
  EXPECT_FALSE(state_of(sampler, 1).contains("given_mass"));

  sampler.set_mass(ones, ones);
  StateDict saved = sampler.state_dict();
  const StateDict kept = StateDict(saved.at("state")).at(0);
  kept.at("given_friction").toTensor().fill_(-1);
  SGHMC other(Parameters(), SGHMCOptions(0.01).num_data(50));
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { other.load_state_dict(saved); }),
      "Invalid state_dict: given_friction of parameter 0 has elements out of "
      "range (must be finite and > 0)");
}

TEST(SGHMC, ComparesEachCoordinatesNoiseWithItsFriction) {
  const std::vector<at::Tensor> params = Parameters();
  SGHMC sampler(params, Given());
  // β̂ = lr N V / (2T) = 0.25 V
  sampler.set_gradient_variance({torch::zeros({}), torch::full({}, 0.6)});
  const at::Tensor mass = torch::tensor({1.0, 1.0, 0.5});
  sampler.set_mass({torch::ones({}), mass},
                   {torch::ones({}), torch::tensor({3.0, 2.0, 0.5})});
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); }),
            "Invalid noise_estimate: 0.15 in the noisiest coordinate. No "
            "parameter has changed (must not exceed its friction (1 - "
            "momentum) C = 0.05: lower momentum or lr, or take larger "
            "minibatches)");
  sampler.set_mass({torch::ones({}), mass},
                   {torch::ones({}), torch::tensor({3.0, 2.0, 1.6})});
  sampler.step();
}

TEST(SGHMC, TakesACovariance) {
  const std::vector<at::Tensor> params = Parameters();
  SGHMC sampler(params, Given());
  EXPECT_EQ(Refused(sampler, torch::ones({2, 2})),
            "Invalid gradient covariance: it is of torch::kFloat and shape [2, "
            "2] (must be floating point, and [5, 5]: all coordinates, in the "
            "order of the parameters)");
  EXPECT_EQ(Refused(sampler, at::Tensor()),
            "Invalid gradient covariance: it is undefined");
  EXPECT_EQ(Refused(sampler, torch::ones({5, 5}).triu()),
            "Invalid gradient covariance: it has elements out of range (must "
            "be finite, and symmetric)");
  const at::Tensor row = torch::zeros({1, 5});
  SGHMC many({row}, Given().num_chains(1));
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { many.set_gradient_covariance(torch::eye(5)); }),
            "Invalid gradient covariance: a matrix excludes num_chains (give "
            "the variance of each coordinate)");

  // α - B has the eigenvalue 0.1 - 0.25 * 5 * 0.4.
  sampler.set_gradient_covariance(torch::full({5, 5}, 0.4, at::kDouble));
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); }),
            "Invalid noise_estimate: -0.4 is the least eigenvalue of α - B, α "
            "= 1 - momentum and B = lr N Var / (2 T) (must be >= 0: lower "
            "momentum or lr, or take larger minibatches)");
  // All of the friction's noise, in one direction.
  sampler.set_gradient_covariance(torch::full({5, 5}, 0.08, at::kDouble));
  sampler.step();
  EXPECT_FALSE(torch::equal(params[0], torch::zeros_like(params[0])));

  StateDict saved = sampler.state_dict();
  SGHMC other(Parameters(), Given());
  other.load_state_dict(saved);
  StateDict state = saved.at("state");
  state.set("gradient_noise", torch::eye(5));
  saved.set("state", state);
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { other.load_state_dict(saved); }),
      "Invalid state_dict: gradient_noise (must be a dict of covariance, "
      "a Tensor)");
  sampler.options().noise_estimate(0.01);
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] { sampler.step(); }),
            "Invalid noise_estimate: 0.01 (must be 'given' in all groups "
            "beside a matrix over all coordinates; "
            "set_gradient_variance(std::nullopt) removes it)");
  sampler.options().noise_estimate("given");
  const at::Tensor late = torch::ones({2}, at::kDouble).requires_grad_(true);
  sampler.add_param_group(torch::optim::OptimizerParamGroup({late}));
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { sampler.step(); }),
            "SGHMC has a gradient covariance over 5 coordinates, and its "
            "parameters have 7: call set_gradient_covariance() anew");
}

TEST(Minibatch, RefusesGradientsThatAreNotOfExamples) {
  const auto refused = [](const std::vector<at::Tensor>& gradients) {
    return MessageOf<std::invalid_argument>(
        [&] { minibatch_variance(gradients, 5); });
  };
  EXPECT_EQ(refused({}), "Invalid gradients: none");
  EXPECT_EQ(refused({torch::ones({})}),
            "Invalid gradients: undefined, or without a dimension of examples "
            "(must be [n, *shape] for each parameter)");
  EXPECT_EQ(refused({torch::ones({3}), torch::ones({2})}),
            "Invalid gradients: number 1 is of torch::kFloat and shape [2] "
            "(must be floating point, of 3 examples)");
  EXPECT_EQ(refused({torch::ones({1, 3})}),
            "Invalid gradients: of 1 examples (must be at least 2)");
  EXPECT_EQ(refused({torch::ones({6, 3})}),
            "Invalid num_data: 5 (must be at least the 6 examples)");
}

}  // namespace
}  // namespace torch_sgmcmc
