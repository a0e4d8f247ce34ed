// Gradients at any place in a graph, not only those of tensors at hand.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
// Without it an edge is incomplete.
#include <torch/csrc/autograd/function.h>

#include <vector>

namespace torch_sgmcmc {

using Edges = std::vector<torch::autograd::Edge>;

torch::autograd::Edge EdgeOf(const at::Tensor& tensor);
Edges EdgesOf(const std::vector<at::Tensor>& tensors);

// The gradients at some places of the weighted roots, undefined where these do
// not depend on them, as torch.autograd.grad has them with GradientEdges. The
// graph is kept.
std::vector<at::Tensor> GradientsAt(const Edges& roots,
                                    const Edges& places,
                                    const std::vector<at::Tensor>& weights,
                                    bool create_graph);

// The gradient at all parameters, [d], with a graph; 0 where there is none.
at::Tensor FlatGradient(const torch::autograd::Edge& output,
                        const std::vector<at::Tensor>& params,
                        const at::Tensor& weights);

}  // namespace torch_sgmcmc
