// What the samplers share that call their closure themselves, several times a
// step.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
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

}  // namespace torch_sgmcmc
