// Stochastic gradient Langevin dynamics (Welling and Teh 2011).
//
//   torch_sgmcmc::SGLD sampler(
//       net->parameters(),
//       torch_sgmcmc::SGLDOptions(0.5).num_data(50'000).seed(0));
//   for (auto& batch : *loader) {
//     sampler.zero_grad();
//     auto logits = net->forward(batch.data);
//     torch::nn::functional::cross_entropy(logits, batch.target).backward();
//     sampler.step();
//   }
#pragma once

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of SGLD: lr, num_data, prior_precision, prior_mean,
/// temperature, num_chains, seed and capturable (see ManyChainsOf).
class TORCH_SGMCMC_API SGLDOptions : public ManyChainsOf<SGLDOptions> {
 public:
  using ManyChainsOf::ManyChainsOf;
  static constexpr const char* kSampler = "SGLD";
};

/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ - μ‖²/2. With ḡ the
/// gradient of the mean loss of a minibatch, as backward() leaves it,
///
///   g = ḡ + (λ/N) (θ - μ),    θ ← θ - lr g + √(2 lr T / N) ξ,    ξ ~ N(0, I).
///
/// lr has the meaning of torch::optim::SGD's. The error is of the order of lr,
/// plus the variance of the minibatches' noise. Parameters have no state.
///
/// All samplers keep θ of a parameter in bf16 or fp16 in fp32, as state
/// "master". The parameter is θ rounded to nearest, and the gradient is
/// evaluated there. A parameter that is changed between steps sets θ.
///
/// Reference: M. Welling and Y. W. Teh, Bayesian Learning via Stochastic
/// Gradient Langevin Dynamics, ICML 2011, eq. 4.
class TORCH_SGMCMC_API SGLD final : public SamplerOf<SGLDOptions> {
 public:
  using SamplerOf::SamplerOf;
};

}  // namespace torch_sgmcmc
