// The two estimators of a likelihood from a subsample:
// torch_sgmcmc/ecs/likelihood.py in C++.
//
// d_i = l_i - q_i is what the control variates leave of a datum's
// log-likelihood. Both estimate L / exp(sum q_k) = exp(sum d_k).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torch_sgmcmc {

// Which one, and with what sizes; without products it is the perturbed one.
struct LikelihoodEstimator {
  double num_data = 1;
  int64_t batch_size = 1;    // m, of the block-Poisson estimator
  int64_t num_products = 0;  // λ
  double lower_bound = 0;    // a
};

// An estimate, as the logarithm of its absolute value and its sign.
struct LikelihoodEstimate {
  at::Tensor log;      // scalar
  at::Tensor weights;  // [M], its derivatives by the differences
  int64_t sign = 1;
  at::Tensor variance;  // scalar, the estimated variance of `log`
  at::Tensor mean;      // scalar, the estimate of sum d_k
};

// In torch's own operations, for any device: exp(d^ - s^2 / 2), eq. 4.1, 4.3
// and 4.5 of Dang et al. 2019, or eq. 5.1, of all minibatches one after the
// other.
LikelihoodEstimate EstimateLikelihood(const LikelihoodEstimator& sizes,
                                      const at::Tensor& differences);

}  // namespace torch_sgmcmc
