#include "libtorch/core/correlated_noise.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "libtorch/core/checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

// As in torch_sgmcmc/core/correlated_noise.py, which says why.
constexpr double kRounding = 1e-12;
constexpr double kAsymmetry = 1e-5;

double LargestOf(const at::Tensor& value) {
  return value.numel() == 0 ? 0 : value.abs().max().item<double>();
}

// L with L L^T = `rest`, or undefined if a pivot is not positive. `rest` is
// lost.
at::Tensor Cholesky(const at::Tensor& rest) {
  at::Tensor factor = at::zeros_like(rest);
  const int64_t size = rest.size(0);
  for (int64_t j = 0; j < size; ++j) {
    const auto pivot = rest[j][j].item<double>();
    if (!(pivot > 0)) return {};
    const at::Tensor column =
        rest.select(1, j).narrow(0, j, size - j) / std::sqrt(pivot);
    factor.select(1, j).narrow(0, j, size - j).copy_(column);
    const int64_t left = size - j - 1;
    const at::Tensor below = column.narrow(0, 1, left);
    rest.narrow(0, j + 1, left)
        .narrow(1, j + 1, left)
        .sub_(below.unsqueeze(1) * below);
  }
  return factor;
}

}  // namespace

at::Tensor CheckedCovariance(const std::string& what,
                             const at::Tensor& value,
                             int64_t size,
                             c10::Device device) {
  if (!value.defined()) Invalid(what + " is undefined");
  if (value.layout() != at::kStrided || value.is_meta()) {
    Invalid(what + " has the layout " + LayoutName(value.layout()) +
            " on the device " + value.device().str() +
            " (must be torch::kStrided, with numbers)");
  }
  if (!value.is_floating_point() ||
      value.sizes() != at::IntArrayRef({size, size})) {
    Invalid(what + " is of " + DtypeName(value.scalar_type()) + " and shape " +
            Shape(value.sizes()) + " (must be floating point, and " +
            Shape({size, size}) +
            ": all coordinates, in the order of the parameters)");
  }
  const at::Tensor copy = value.detach().to(
      device, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  const double largest = LargestOf(copy);
  const double off = LargestOf(copy - copy.t());
  if (!(largest < std::numeric_limits<double>::infinity()) ||
      off > kAsymmetry * largest) {
    Invalid(what +
            " has elements out of range (must be finite, and symmetric)");
  }
  return (copy + copy.t()) / 2;
}

at::Tensor NoiseFactor(const at::Tensor& friction,
                       const at::Tensor& scale,
                       const at::Tensor& covariance) {
  const at::Tensor rest =
      friction.diag() - scale.unsqueeze(1) * covariance * scale;
  const at::Tensor factor = Cholesky(
      rest.to(at::kCPU, at::kDouble, /*non_blocking=*/false, /*copy=*/true));
  if (factor.defined()) return factor.to(rest.device());
  const auto [values, vectors] = at::linalg_eigh(rest);
  const auto least = values[0].item<double>();
  if (least < -kRounding * friction.max().item<double>()) {
    Invalid("Invalid noise_estimate: " + SixDigits(least) +
            " is the least eigenvalue of α - B, α = 1 - momentum and B = lr N "
            "Var / (2 T) (must be >= 0: lower momentum or lr, or take larger "
            "minibatches)");
  }
  return vectors * values.clamp_min(0).sqrt();
}

at::Tensor Correlated(const at::Tensor& factor, const at::Tensor& noise) {
  return (factor * noise).sum(1);
}

}  // namespace torch_sgmcmc
