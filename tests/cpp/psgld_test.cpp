// PSGLD's preconditioner that stays: it is that of the present V and eps.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

namespace torch_sgmcmc {
namespace {

TEST(PSGLD, TheRootIsThatOfThePresentVAndEps) {
  const at::Tensor p = torch::ones({7}).set_requires_grad(true);
  PSGLD sampler({p},
                PSGLDOptions(0.5).num_data(10).temperature(0).eps(0.1).seed(1));
  p.mutable_grad() = torch::rand({7});
  sampler.step();
  sampler.options().adapt(false);
  const auto expect = [&](double eps) {
    const at::Tensor v = sampler.state_of(p)["square_average"];
    const at::Tensor wanted = p.detach() - 0.5 * p.grad() / (v.sqrt() + eps);
    sampler.step();
    EXPECT_TRUE(torch::allclose(p.detach(), wanted, 1e-5, 1e-6));
  };
  expect(0.1);
  expect(0.1);  // as it was kept
  sampler.options().eps(0.3);
  expect(0.3);
  sampler.own_state_of(p)["square_average"].add_(1);
  expect(0.3);
  sampler.own_state_of(p)["square_average"] = torch::rand({7});
  expect(0.3);
}

TEST(PSGLD, AdaptationAfterRestIsNotLost) {
  const auto run = [](bool rests) {
    const at::Tensor p = torch::ones({5}).set_requires_grad(true);
    PSGLD sampler({p}, PSGLDOptions(0.1).num_data(10).eps(0.1).seed(1));
    for (int step = 0; step < 6; ++step) {
      p.mutable_grad() = p.detach() * (step + 1);
      const bool adapts = step != 2 && step != 5;
      sampler.options().adapt(adapts);
      if (step == 5 && !rests) {
        // The same with a V that nothing has been kept of.
        at::Tensor& v = sampler.own_state_of(p)["square_average"];
        v = v.clone();
      }
      sampler.step();
    }
    return p.detach();
  };
  EXPECT_TRUE(torch::equal(run(true), run(false)));
}

}  // namespace
}  // namespace torch_sgmcmc
