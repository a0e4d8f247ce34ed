// The state dict of torch::optim::SGD, as Python's torch.optim.SGD has it.
//
// The library's samplers have state dicts of their own in both languages.
// LibTorch's optimizers have not: torch::save of one is nothing that Python can
// read.
#pragma once

#include <torch/optim/sgd.h>
#include <torch_sgmcmc/state_dict.h>

namespace bnn {

torch_sgmcmc::StateDict SGDStateDict(const torch::optim::SGD& sgd);

/// Takes the momenta. Throws std::invalid_argument if one is of another shape
/// than its parameter.
void LoadSGDStateDict(torch::optim::SGD& sgd,
                      const torch_sgmcmc::StateDict& dict);

}  // namespace bnn
