// SGHMC in C++, beyond what tests/cpp/test_cpp_chains.py compares with Python.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <vector>

#include "message_of.h"

namespace torch_sgmcmc {
namespace {

std::vector<at::Tensor> Parameters() {
  std::vector<at::Tensor> params = {torch::zeros({2}, at::kDouble),
                                    torch::zeros({3}, at::kDouble)};
  for (at::Tensor& param : params) {
    param.requires_grad_(true);
    param.mutable_grad() = torch::ones_like(param);
  }
  return params;
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

TEST(SGHMC, HasNoVariancesThatAreGiven) {
  EXPECT_EQ(MessageOf<std::invalid_argument>([] {
              SGHMC(Parameters(),
                    SGHMCOptions(0.01).num_data(50).noise_estimate("given"));
            }),
            "Invalid noise_estimate: 'given' (must be a number or 'online')");
}

TEST(SGHMC, ComparesEachCoordinatesNoiseWithItsFriction) {
  const std::vector<at::Tensor> params = Parameters();
  SGHMC sampler(
      params, SGHMCOptions(0.01).num_data(50).seed(5).noise_estimate("online"));
  const auto with = [&](double friction) {
    sampler.set_mass({torch::ones({}), torch::tensor({1.0, 1.0, 0.5})},
                     {torch::ones({}), torch::tensor({3.0, 2.0, friction})});
  };
  with(0.5);
  // Half the square of what consecutive ones differ by, V, is 0.6.
  params[1].mutable_grad().fill_(std::sqrt(0.3));
  const auto step = [&] {
    params[1].mutable_grad().neg_();
    sampler.step();
  };
  for (int i = 0; i < 100; ++i) step();
  // β̂ = lr N V / (2T) = 0.25 V
  EXPECT_EQ(MessageOf<std::invalid_argument>(step),
            "Invalid noise_estimate: 0.15 in the noisiest coordinate. No "
            "parameter has changed; the gradients have entered the estimate "
            "(must not exceed its friction (1 - momentum) C = 0.05: lower "
            "momentum or lr, or take larger minibatches)");
  with(1.6);
  step();
}

}  // namespace
}  // namespace torch_sgmcmc
