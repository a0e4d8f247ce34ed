// PSGLD's preconditioner that stays: it is that of the present V and eps.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include "message_of.h"

namespace torch_sgmcmc {
namespace {

at::Tensor RootOf(const at::Tensor& v, double eps) {
  return v.sqrt().add_(eps).sqrt_().reciprocal_();
}

TEST(PSGLD, TheRootIsThatOfThePresentVAndEps) {
  PSGLDParamState state;
  state.square_average = torch::rand({7});
  const at::Tensor first = state.root(0.1);
  EXPECT_TRUE(torch::equal(first, RootOf(state.square_average, 0.1)));
  EXPECT_TRUE(state.root(0.1).is_same(first));

  EXPECT_TRUE(torch::equal(state.root(0.3), RootOf(state.square_average, 0.3)));
  state.square_average.add_(1);
  EXPECT_TRUE(torch::equal(state.root(0.3), RootOf(state.square_average, 0.3)));
  state.square_average = torch::rand({7});
  EXPECT_TRUE(torch::equal(state.root(0.3), RootOf(state.square_average, 0.3)));

  // What an update changes, torch does not see.
  const at::Tensor last = state.root(0.3);
  state.drop_root();
  EXPECT_FALSE(state.root(0.3).is_same(last));
  EXPECT_FALSE(state.to_dict().contains("root"));
}

TEST(PSGLD, AdaptationAfterRestIsNotLost) {
  const auto run = [](bool rests) {
    const at::Tensor p = torch::ones({5}).set_requires_grad(true);
    PSGLD sampler({p},
                  PSGLDOptions(0.1).num_data(10).gamma(false).eps(0.1).seed(1));
    for (int step = 0; step < 6; ++step) {
      p.mutable_grad() = p.detach() * (step + 1);
      const bool adapts = step != 2 && step != 5;
      sampler.options().adapt(adapts);
      if (step == 5 && !rests) {
        // The same with a V that nothing has been kept of.
        auto& state = static_cast<PSGLDParamState&>(
            *sampler.state().at(p.unsafeGetTensorImpl()));
        state.square_average = state.square_average.clone();
      }
      sampler.step();
    }
    return p.detach();
  };
  EXPECT_TRUE(torch::equal(run(true), run(false)));
}

TEST(PSGLD, GammaOfParametersThatHaveChanged) {
  const at::Tensor p = torch::ones({2}).set_requires_grad(true);
  const at::Tensor q = torch::ones({2}).set_requires_grad(true);
  const PSGLDOptions options = PSGLDOptions(0.1).num_data(10).seed(1);
  PSGLD first({p}, options);
  PSGLD second({q}, options);
  (p * q).square().sum().backward({}, /*retain_graph=*/std::nullopt, true);
  first.step();
  EXPECT_EQ(
      MessageOf<std::runtime_error>([&] { second.step(); }),
      "PSGLD got gradients of parameters that have changed since, and Γ needs "
      "second derivatives: step once for each backward pass, after it, and "
      "sample all parameters of a loss with one sampler");
  EXPECT_TRUE(q.equal(torch::ones({2})));
  for (const at::Tensor& param : {p, q}) param.mutable_grad().reset();
}

}  // namespace
}  // namespace torch_sgmcmc
