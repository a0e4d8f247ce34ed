// Gradients for many rows of an output's gradients in one backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torch_sgmcmc {

// The gradients for each row of the output's gradients in one pass, as
// torch.autograd.grad(..., is_grads_batched=True) has them.
std::vector<at::Tensor> BatchedGradients(const at::Tensor& output,
                                         const std::vector<at::Tensor>& inputs,
                                         const at::Tensor& rows,
                                         bool allow_unused);

// The same of all parameters, [rows, d], 0 where one has no part in the output.
at::Tensor BatchedRows(const at::Tensor& output,
                       const std::vector<at::Tensor>& params,
                       const at::Tensor& basis);

// The rows of the identity, in pieces that keep memory bounded.
std::vector<at::Tensor> Bases(int64_t d, const at::Tensor& like, int64_t width);

// The derivative of `slope` [d], one element for each of the parameters', by
// all of them: [d, d]. The pass for one row is thought to take `width`
// elements.
at::Tensor Jacobian(const at::Tensor& slope,
                    const std::vector<at::Tensor>& params,
                    int64_t width);

}  // namespace torch_sgmcmc
