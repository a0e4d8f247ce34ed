#include "libtorch/ecs/whitening.h"

#include <ATen/ATen.h>

#include <optional>

#include "libtorch/core/operators.h"

namespace torch_sgmcmc {
namespace {

at::Tensor Floored(const at::Tensor& curvatures) {
  const at::Tensor size = curvatures.abs();
  const auto largest = size.max().item<double>();
  if (!(largest > 0)) return at::ones_like(size);
  return size.clamp_min(1e-8 * largest);
}

at::Tensor Times(const at::Tensor& factor, const at::Tensor& x) {
  return factor.dim() == 1 ? factor * x : at::mv(factor, x);
}

}  // namespace

at::Tensor Whitening(const std::string& kind, const at::Tensor& hessian) {
  if (kind == "identity" || !hessian.defined()) return {};
  if (kind == "diagonal") return Floored(hessian.diagonal()).rsqrt();
  const auto [factor, info] = at::linalg_cholesky_ex(hessian);
  if (info.item<int64_t>() == 0) {
    const at::Tensor identity = at::eye(hessian.size(0), hessian.options());
    return at::linalg_solve_triangular(factor.mT(), identity, /*upper=*/true)
        .contiguous();
  }
  const auto [curvatures, directions] = at::linalg_eigh(hessian);
  return (directions * Floored(curvatures).rsqrt()).contiguous();
}

at::Tensor WhitenedLeapfrog(const at::Tensor& x,
                            const at::Tensor& r,
                            const at::Tensor& factor,
                            const at::Tensor& gradient,
                            const at::Tensor& origin,
                            double kick,
                            double drift) {
  if (x.is_cpu()) {
    return ecs_leapfrog_(
        x,
        r,
        gradient,
        factor.defined() ? std::optional(factor) : std::nullopt,
        origin,
        kick,
        drift);
  }
  r.add_(factor.defined() ? Times(factor.t(), gradient) : gradient, kick);
  x.add_(r, drift);
  return origin + (factor.defined() ? Times(factor, x) : x);
}

double KineticEnergy(const at::Tensor& r) {
  return sum_of_squares({r}).item<double>() / 2;
}

}  // namespace torch_sgmcmc
