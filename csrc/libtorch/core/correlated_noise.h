// SGHMC's noise where that of minibatches is correlated between coordinates:
// torch_sgmcmc/core/correlated_noise.py in C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace torch_sgmcmc {

// A copy in fp64 of a covariance over so many coordinates. Throws
// std::invalid_argument, which begins with `what`, unless it is of their shape,
// finite and symmetric.
at::Tensor CheckedCovariance(const std::string& what,
                             const at::Tensor& value,
                             int64_t size,
                             c10::Device device);

// L with L L^T = diag(friction) - diag(scale) V diag(scale), in fp64. Throws
// std::invalid_argument if an eigenvalue is negative.
at::Tensor NoiseFactor(const at::Tensor& friction,
                       const at::Tensor& scale,
                       const at::Tensor& covariance);

// Noise by a factor: their product, which does not depend on threads as those
// of a BLAS may.
at::Tensor Correlated(const at::Tensor& factor, const at::Tensor& noise);

}  // namespace torch_sgmcmc
