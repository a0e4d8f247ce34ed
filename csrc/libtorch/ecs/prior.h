// The Gaussian prior of HMC-ECS, of all parameters as one row.
#pragma once

#include <ATen/ATen.h>

namespace torch_sgmcmc {

// Of each element its precision and its mean, [d] in float64.
struct ECSPrior {
  at::Tensor precision;
  at::Tensor mean;

  // λ (θ - μ).
  at::Tensor slope(const at::Tensor& theta) const {
    return precision * (theta - mean);
  }
  // Σ λ (θ - μ)² / 2.
  at::Tensor energy(const at::Tensor& theta) const {
    return at::dot(slope(theta), theta - mean) * 0.5;
  }
};

}  // namespace torch_sgmcmc
