#include "libtorch/ecs/likelihood_graph.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "libtorch/core/checks.h"
#include "libtorch/core/gradient_edges.h"
#include "libtorch/core/jacobians.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

// Data whose log-likelihoods are differentiated in one batch of backward
// passes: each pass goes through all of them.
constexpr int64_t kTogether = 8;

// Data from which on single backward passes are quicker than a batch of them,
// in which the products of matrices with vectors become slow batches of
// products of matrices (as in Python).
constexpr int64_t kSingly = 1024;

}  // namespace

at::Tensor LogLikelihoods(const DataClosure& closure,
                          const at::Tensor& indices) {
  at::Tensor values = closure(indices);
  if (!values.defined()) {
    Invalid(
        "Invalid log-likelihoods: the closure returned an undefined Tensor "
        "(must be a tensor, of one for each index)");
  }
  if (values.sizes() != indices.sizes()) {
    Invalid("Invalid log-likelihoods: shape " + Shape(values.sizes()) +
            " (must be " + Shape(indices.sizes()) + ", one for each index)");
  }
  if (at::GradMode::is_enabled() && !values.requires_grad()) {
    throw std::runtime_error(
        "HMCECS got log-likelihoods from the closure that do not depend on the "
        "parameters, or have no graph");
  }
  return values;
}

at::Tensor ValuesWithGraph(const DataClosure& closure,
                           const at::Tensor& indices) {
  const at::AutoGradMode enable_grad(true);
  return LogLikelihoods(closure, indices);
}

at::Tensor ColumnsOfLinear(const at::Tensor& pull, const at::Tensor& weights) {
  const int64_t d = pull.numel();
  const int64_t size = weights.numel();
  at::Tensor out = at::empty({d, size}, pull.options().requires_grad(false));
  int64_t begin = 0;
  for (const at::Tensor& basis : Bases(d, pull, d + size)) {
    const int64_t end = begin + basis.size(0);
    if (size < kSingly) {
      const at::Tensor rows =
          BatchedGradients(pull, {weights}, basis, /*allow_unused=*/false)[0];
      out.slice(0, begin, end).copy_(rows.reshape({-1, size}));
    } else {
      for (int64_t i = begin; i < end; ++i) {
        const at::Tensor part = torch::autograd::grad({pull},
                                                      {weights},
                                                      {basis[i - begin]},
                                                      /*retain_graph=*/true)[0];
        out[i].copy_(part.reshape({size}));
      }
    }
    begin = end;
  }
  return out;
}

LikelihoodGraph::LikelihoodGraph(at::Tensor values,
                                 const std::vector<at::Tensor>& params)
    : params_(params), values_(std::move(values)) {
  weights_ = at::ones_like(values_.detach()).requires_grad_();
  slope_ = FlatGradient(EdgeOf(values_), params_, weights_);
}

at::Tensor LikelihoodGraph::gradients() const {
  return ColumnsOfLinear(slope_, weights_).t().contiguous();
}

at::Tensor LikelihoodGraph::hessian() const {
  return Jacobian(slope_, params_, slope_.numel() + values_.numel());
}

at::Tensor LikelihoodGraph::hessian_products(const at::Tensor& z) const {
  const auto [pull, weights] = bent(z);
  if (!pull.defined()) {
    return at::zeros({values_.numel(), z.numel()},
                     values_.options().requires_grad(false));
  }
  return ColumnsOfLinear(pull, weights).t().contiguous();
}

at::Tensor LikelihoodGraph::curvatures(const at::Tensor& z) const {
  const auto [pull, weights] = bent(z);
  if (!pull.defined()) return at::zeros_like(values_.detach());
  return torch::autograd::grad({pull},
                               {weights},
                               {z.to(pull.scalar_type())},
                               /*retain_graph=*/true)[0];
}

at::Tensor LikelihoodGraph::along(const at::Tensor& z) const {
  return torch::autograd::grad({slope_},
                               {weights_},
                               {z.to(slope_.scalar_type())},
                               /*retain_graph=*/std::nullopt,
                               /*create_graph=*/true)[0];
}

LikelihoodGraph::Linear LikelihoodGraph::bent(const at::Tensor& z) const {
  const at::Tensor slopes = along(z);
  const at::Tensor weights = at::ones_like(slopes).requires_grad_();
  if (!slopes.requires_grad()) return {{}, weights};  // l is linear
  const at::Tensor pull = FlatGradient(EdgeOf(slopes), params_, weights);
  return {pull.requires_grad() ? pull : at::Tensor(), weights};
}

LikelihoodRows GradientsByData(const DataClosure& closure,
                               const std::vector<at::Tensor>& params,
                               const at::Tensor& indices) {
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> rows;
  for (const at::Tensor& part : indices.split(kTogether)) {
    const at::Tensor outputs = ValuesWithGraph(closure, part);
    const at::Tensor basis =
        at::eye(outputs.numel(), outputs.options().requires_grad(false));
    rows.push_back(BatchedRows(outputs, params, basis));
    values.push_back(outputs.detach());
  }
  return {at::cat(values), at::cat(rows)};
}

}  // namespace torch_sgmcmc
