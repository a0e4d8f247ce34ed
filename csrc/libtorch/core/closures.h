// What the samplers share that call their closure themselves, several times a
// step.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

// Has the closure make gradients, where there are none; returns its loss.
torch::Tensor FreshGradients(
    std::vector<torch::optim::OptimizerParamGroup>& groups,
    const torch::optim::Optimizer::LossClosure& closure);

// Whether the same parameters have gradients.
bool SameParameters(const std::vector<Work>& first,
                    const std::vector<Work>& second);

// Throws unless a parameter holds so many chains.
void CheckChains(const at::Tensor& param,
                 const std::optional<int64_t>& num_chains);

// Lets parameters have other memory while it lives.
class Exchanged {
 public:
  Exchanged(std::vector<at::Tensor> params,
            const std::vector<at::Tensor>& values);
  ~Exchanged();
  Exchanged(const Exchanged&) = delete;
  Exchanged& operator=(const Exchanged&) = delete;
  Exchanged(Exchanged&&) = delete;
  Exchanged& operator=(Exchanged&&) = delete;

 private:
  std::vector<at::Tensor> params_;
  std::vector<at::Tensor> own_;
};

}  // namespace torch_sgmcmc
