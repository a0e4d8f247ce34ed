// How the state of a parameter begins.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "core/row.h"
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

// Begins, as a row says, what has not begun: `tensors` points to that of each
// of work.params.
void StartState(const Work& work,
                const std::vector<at::Tensor*>& tensors,
                Start how);

}  // namespace torch_sgmcmc
