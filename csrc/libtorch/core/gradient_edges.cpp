#include "libtorch/core/gradient_edges.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "libtorch/ecs/taylor.h"

namespace torch_sgmcmc {

torch::autograd::Edge EdgeOf(const at::Tensor& tensor) {
  return torch::autograd::impl::gradient_edge(tensor);
}

Edges EdgesOf(const std::vector<at::Tensor>& tensors) {
  Edges edges;
  edges.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    edges.push_back(EdgeOf(tensor));
  }
  return edges;
}

std::vector<at::Tensor> GradientsAt(const Edges& roots,
                                    const Edges& places,
                                    const std::vector<at::Tensor>& weights,
                                    bool create_graph) {
  return torch::autograd::Engine::get_default_engine().execute(
      roots,
      weights,
      /*keep_graph=*/true,
      create_graph,
      /*accumulate_grad=*/false,
      places);
}

at::Tensor FlatGradient(const torch::autograd::Edge& output,
                        const std::vector<at::Tensor>& params,
                        const at::Tensor& weights) {
  const at::AutoGradMode enable_grad(true);
  std::vector<at::Tensor> grads =
      GradientsAt({output}, EdgesOf(params), {weights}, /*create_graph=*/true);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].defined()) continue;
    grads[i] = at::zeros_like(params[i].detach()).requires_grad_();
  }
  return FlatRow(grads);
}

}  // namespace torch_sgmcmc
