// How the samplers that carry a momentum start it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

// The type of arithmetic and of state for a parameter.
at::ScalarType StateDtype(const at::Tensor& param);

// Zeros like a parameter, in fp64 for fp64 and in fp32 for all others: what a
// sampler remembers is not rounded to half precision.
at::Tensor ZeroState(const at::Tensor& param);

// Whether a parameter is the rounded value of a master: Note [Master
// parameters] in core/roles.h.
bool HasMaster(const at::Tensor& param);

// Gives a first momentum to the parameters that have none: `momenta` points to
// that of each of work.params. Drawn from N(0, lr T / N), or zeros. Returns
// which they were.
std::vector<size_t> StartMomenta(const Work& work,
                                 const std::vector<at::Tensor*>& momenta,
                                 bool stationary);

}  // namespace torch_sgmcmc
