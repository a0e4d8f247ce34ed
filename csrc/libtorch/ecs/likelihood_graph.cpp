#include "libtorch/ecs/likelihood_graph.h"

#include <ATen/ATen.h>
#include <ATen/LegacyVmapMode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "libtorch/core/checks.h"
#include "libtorch/core/gradient_edges.h"
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

// Elements of what is computed at once for a batch of directions.
constexpr int64_t kMostElements = int64_t{1} << 25;

// While it lives, the first dimension of batched tensors is hidden.
class VmapLevel {
 public:
  VmapLevel() : level_(at::impl::VmapMode::increment_nesting()) {}
  ~VmapLevel() { at::impl::VmapMode::decrement_nesting(); }
  VmapLevel(const VmapLevel&) = delete;
  VmapLevel& operator=(const VmapLevel&) = delete;
  VmapLevel(VmapLevel&&) = delete;
  VmapLevel& operator=(VmapLevel&&) = delete;

  int64_t level() const { return level_; }

 private:
  int64_t level_;
};

// The gradients for each row of the output's gradients in one pass, as
// torch.autograd.grad(..., is_grads_batched=True) has them.
std::vector<at::Tensor> BatchedGradients(const at::Tensor& output,
                                         const std::vector<at::Tensor>& inputs,
                                         const at::Tensor& rows,
                                         bool allow_unused) {
  const VmapLevel vmap;
  std::vector<at::Tensor> grads =
      torch::autograd::grad({output},
                            inputs,
                            {at::_add_batch_dim(rows, 0, vmap.level())},
                            /*retain_graph=*/true,
                            /*create_graph=*/false,
                            allow_unused);
  for (at::Tensor& grad : grads) {
    if (!grad.defined()) continue;
    grad = at::_remove_batch_dim(grad, vmap.level(), rows.size(0), 0);
  }
  return grads;
}

// The rows of the identity, in pieces that keep memory bounded.
std::vector<at::Tensor> Bases(int64_t d,
                              const at::Tensor& like,
                              int64_t width) {
  const int64_t rows =
      std::max<int64_t>(1, kMostElements / std::max<int64_t>(1, width));
  std::vector<at::Tensor> pieces;
  for (int64_t begin = 0; begin < d; begin += rows) {
    const int64_t count = std::min(rows, d - begin);
    at::Tensor basis =
        at::zeros({count, d}, like.options().requires_grad(false));
    basis.slice(1, begin, begin + count).fill_diagonal_(1);
    pieces.push_back(std::move(basis));
  }
  return pieces;
}

// The same of all parameters, [rows, d], 0 where one has no part in the output.
at::Tensor BatchedRows(const at::Tensor& output,
                       const std::vector<at::Tensor>& params,
                       const at::Tensor& basis) {
  const int64_t count = basis.size(0);
  std::vector<at::Tensor> rows =
      BatchedGradients(output, params, basis, /*allow_unused=*/true);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = rows[i].defined()
                  ? rows[i].reshape({count, -1})
                  : at::zeros({count, params[i].numel()},
                              params[i].options().requires_grad(false));
  }
  return at::cat(rows, 1);
}

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
  const int64_t d = slope_.numel();
  std::vector<at::Tensor> columns;
  for (const at::Tensor& basis : Bases(d, slope_, d + values_.numel())) {
    columns.push_back(BatchedRows(slope_, params_, basis));
  }
  return at::cat(columns);
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
