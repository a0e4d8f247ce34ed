// SGHMC in C++, beyond what tests/cpp/test_cpp_chains.py compares with Python.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cmath>
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

TEST(SGHMC, RefusesToCaptureAnOnlineEstimate) {
  const auto options =
      SGHMCOptions(0.01).num_data(50).noise_estimate("online").capturable(true);
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { const SGHMC sampler(Parameters(), options); }),
            "Invalid noise_estimate: 'online' is checked on the host at every "
            "step and excludes capturable");
}

TEST(SGHMC, ComparesTheNoisiestCoordinateWithTheFriction) {
  const std::vector<at::Tensor> params = Parameters();
  SGHMC sampler(
      params, SGHMCOptions(0.01).num_data(50).seed(5).noise_estimate("online"));
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
            "(must not exceed the friction 1 - momentum = 0.1: lower momentum "
            "or lr, or take larger minibatches)");
}

}  // namespace
}  // namespace torch_sgmcmc
