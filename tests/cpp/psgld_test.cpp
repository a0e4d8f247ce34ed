// PSGLD's preconditioner that stays: it is that of the present V and eps.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cmath>

#include "message_of.h"

namespace torch_sgmcmc {
namespace {

at::Tensor RootOf(const at::Tensor& v, float eps) {
  at::Tensor root = v.clone();
  auto* x = root.data_ptr<float>();
  for (int64_t i = 0; i < root.numel(); ++i) {
    x[i] = 1 / std::sqrt(std::sqrt(x[i]) + eps);
  }
  return root;
}

TEST(PSGLD, TheRootIsThatOfThePresentVAndEps) {
  detail::KeptRoot root;
  at::Tensor v = torch::rand({7});
  const at::Tensor first = root.of(v, 0.1);
  EXPECT_TRUE(torch::equal(first, RootOf(v, 0.1f)));
  EXPECT_TRUE(root.of(v, 0.1).is_same(first));

  EXPECT_TRUE(torch::equal(root.of(v, 0.3), RootOf(v, 0.3f)));
  v.add_(1);
  EXPECT_TRUE(torch::equal(root.of(v, 0.3), RootOf(v, 0.3f)));
  v = torch::rand({7});
  EXPECT_TRUE(torch::equal(root.of(v, 0.3), RootOf(v, 0.3f)));
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

TEST(PSGLD, HasNoGamma) {
  const at::Tensor p = torch::ones({2}).set_requires_grad(true);
  const PSGLDOptions options = PSGLDOptions(0.1).num_data(10).seed(1);
  EXPECT_FALSE(options.get<bool>("gamma"));
  PSGLDOptions corrected = options;
  corrected.put("gamma", true);
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { PSGLD({p}, corrected); }),
      "Invalid gamma: true (must be false in C++: continue it in Python)");
}

}  // namespace
}  // namespace torch_sgmcmc
