#include "libtorch/core/jacobians.h"

#include <ATen/ATen.h>
#include <ATen/LegacyVmapMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

namespace torch_sgmcmc {
namespace {

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

}  // namespace

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

at::Tensor Jacobian(const at::Tensor& slope,
                    const std::vector<at::Tensor>& params,
                    int64_t width) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& basis : Bases(slope.numel(), slope, width)) {
    rows.push_back(BatchedRows(slope, params, basis));
  }
  return at::cat(rows);
}

}  // namespace torch_sgmcmc
