// The rows of a linear function of the parameters, read off its graph:
// torch_sgmcmc/ecs/linear_rows.py in C++, with which go its notes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
// Without it an edge is incomplete.
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <vector>

namespace torch_sgmcmc {

// The derivatives of `size` outputs at the edge by all parameters, [size, d],
// which may be the matrix itself; undefined if the function is more than a sum
// of products with matrices and of numbers.
at::Tensor ReadRows(const torch::autograd::Edge& edge,
                    const std::vector<at::Tensor>& params,
                    int64_t size);

}  // namespace torch_sgmcmc
