// SBPS in C++, beyond what tests/cpp/test_cpp_chains.py compares with Python.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "message_of.h"

namespace torch_sgmcmc {
namespace {

SBPSOptions Bouncing() {
  return SBPSOptions().num_data(50).prior_precision(20).num_std(3).seed(5);
}

at::Tensor Parameter(at::IntArrayRef shape) {
  return torch::zeros(shape, at::kDouble).set_requires_grad(true);
}

// Losses |theta - x_i|^2 / 2 of 10 examples, other ones at every call.
struct Minibatches {
  at::Tensor param;
  int64_t calls = 0;

  at::Tensor operator()() {
    ++calls;
    const at::Tensor index = torch::arange(10, at::kDouble) + 10 * (calls % 5);
    const at::Tensor x =
        torch::sin(index.unsqueeze(1) + torch::arange(param.numel()));
    return 0.5 * (param.flatten() - x).square().sum(1);
  }
};

TEST(SBPS, RefusesLossesThatItCannotUseAndMovesNothing) {
  const at::Tensor param = Parameter({3});
  SBPS sampler({param}, Bouncing());
  Minibatches draws{param};
  for (int i = 0; i < 7; ++i) sampler.step(draws);
  const at::Tensor place = param.detach().clone();
  const auto message = [&](const std::function<at::Tensor()>& closure) {
    const std::string text = MessageOf([&] { sampler.step(closure); });
    EXPECT_TRUE(torch::equal(param, place)) << text;
    EXPECT_FALSE(param.grad().defined()) << text;
    return text;
  };
  EXPECT_EQ(message([&] { return draws().mean(); }),
            "SBPS got losses of shape [] from the closure (must be the "
            "examples' losses, of shape [n]: use reduction(torch::kNone))");
  EXPECT_EQ(message([&] { return draws().slice(0, 0, 1); }),
            "SBPS got the loss of 1 example from the closure (must be of 2 at "
            "least, to estimate the noise of a minibatch)");
  EXPECT_EQ(message([&] { return draws().repeat(6); }),
            "SBPS got the losses of 60 examples from the closure, and num_data "
            "= 50 (must not be more; if examples are drawn with replacement, "
            "set replacement(true))");
  EXPECT_EQ(message([&] {
              const double infinity = std::numeric_limits<double>::infinity();
              at::Tensor bad = torch::zeros(10, at::kDouble);
              bad[1] = infinity;
              bad[4] = -infinity;
              return draws() + bad;
            }),
            "SBPS got 2 of 10 losses from the closure that are not finite");
  EXPECT_EQ(message([&] {
              at::Tensor losses = draws();
              losses.sum().backward({}, /*retain_graph=*/true);
              return losses;
            }),
            "SBPS found gradients after the closure: it must return the losses "
            "of the examples and not call backward()");
  EXPECT_EQ(message([&] { return draws().detach(); }),
            "SBPS got losses from the closure that do not depend on its "
            "parameters (were they computed under a torch::NoGradGuard?)");
  EXPECT_EQ(message([&] { return draws().to(torch::kComplexFloat); }),
            "SBPS got complex losses from the closure (must be real numbers)");
  sampler.step(draws);
  EXPECT_FALSE(torch::equal(param, place));
}

}  // namespace
}  // namespace torch_sgmcmc
