// Log-likelihoods that show the linear predictors that they are made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "torch_sgmcmc/export.h"

namespace torch_sgmcmc {

/// Per-datum log-likelihoods l_k = L_k(f_k(θ)), in two parts: a closure for
/// HMCECS as any other, log_likelihood(outputs(indices), indices).
///
/// In a regression the output is one number, linear in the parameters,
/// η_k = x_k'θ + const. With rows, which says what x_k is,
///
///   grad l_k = L_k'(η_k) x_k,  H_k = L_k''(η_k) x_k x_k'
///
/// take no backward pass through the model:
///
///   const torch_sgmcmc::LogLikelihood closure(
///       [&](const torch::Tensor& indices) {
///         return x.index({indices}).mv(theta);
///       },
///       [&](const torch::Tensor& eta, const torch::Tensor& indices) {
///         return y.index({indices}) * eta - torch::softplus(eta);
///       },
///       [&](const torch::Tensor& indices) { return x.index({indices}); });
///   sampler.step(closure);
///
/// HMCECS sees the rows of a LogLikelihood itself, not of a function around it.
class TORCH_SGMCMC_API LogLikelihood {
 public:
  using OfData = std::function<at::Tensor(const at::Tensor& indices)>;
  using OfOutputs = std::function<at::Tensor(const at::Tensor& outputs,
                                             const at::Tensor& indices)>;

  /// `outputs` returns the model's outputs [M, ...] for the data with the given
  /// indices [M], with a graph, those of a datum being independent of the
  /// others; `log_likelihood` the log-likelihoods [M] of data with such
  /// outputs, twice differentiable by these and dependent on the parameters
  /// through them alone. `rows`, if there is one, returns the matrix x [M, d]
  /// of the data's predictors, outputs(indices) [M] being x θ + const: θ is the
  /// parameters, flattened, in their order. A choice of θ* compares it with the
  /// derivatives of `outputs` in a random direction, for 256 data.
  ///
  /// Throws std::invalid_argument if `outputs` or `log_likelihood` is empty;
  /// calls do if outputs or rows are not of the shape above, or rows are not
  /// the derivatives of outputs.
  LogLikelihood(OfData outputs,
                OfOutputs log_likelihood,
                OfData rows = nullptr);

  /// The log-likelihoods of the data with these indices.
  at::Tensor operator()(const at::Tensor& indices) const;

  /// The model's outputs for these data.
  at::Tensor outputs(const at::Tensor& indices) const;
  /// The log-likelihoods of data with these outputs.
  at::Tensor of_outputs(const at::Tensor& outputs,
                        const at::Tensor& indices) const;
  /// Whether the outputs are said to be linear predictors.
  bool has_rows() const { return rows_ != nullptr; }
  /// The rows of the linear predictors of these data, [M, d].
  at::Tensor rows(const at::Tensor& indices, int64_t d) const;

 private:
  OfData outputs_;
  OfOutputs log_likelihood_;
  OfData rows_;
};

}  // namespace torch_sgmcmc
