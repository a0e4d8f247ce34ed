// Parameters, options and comparisons of the samplers' tests.
#pragma once

#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include "testing.h"

namespace torch_sgmcmc {

inline torch::Tensor Param(int64_t numel, torch::Dtype dtype = torch::kFloat,
                           torch::Device device = torch::kCPU) {
  auto param = torch::linspace(-1, 1, numel, dtype).to(device);
  param.set_requires_grad(true);
  param.mutable_grad() = torch::ones_like(param).mul_(0.1);
  return param;
}

inline std::vector<torch::Tensor> Params() { return {Param(300), Param(5)}; }

inline std::vector<torch::Tensor> Copies(
    const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> copies;
  for (const auto& param : params) copies.push_back(param.detach().clone());
  return copies;
}

inline void ExpectEqual(const std::vector<torch::Tensor>& a,
                        const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i]));
}

inline void ExpectDifferent(const std::vector<torch::Tensor>& a,
                            const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_FALSE(torch::equal(a[i], b[i]));
}

inline SGLDOptions Langevin() { return SGLDOptions(0.1).num_data(50).seed(7); }
inline SGHMCOptions Hamiltonian() {
  return SGHMCOptions(0.1).num_data(50).seed(7);
}

}  // namespace torch_sgmcmc
