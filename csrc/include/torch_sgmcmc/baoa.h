// BAOA (Leimkuhler and Matthews 2013): SGHMC that is exact on quadratics.
//
//   torch_sgmcmc::BAOA sampler(
//       net->parameters(),
//       torch_sgmcmc::BAOAOptions(0.1).momentum(0.99).num_data(50'000));
//
// The training loop is the one of sgld.h, and of torch::optim::SGD.
#pragma once

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of BAOA: ManyChainsOf's and the following.
class TORCH_SGMCMC_API BAOAOptions : public ManyChainsOf<BAOAOptions> {
 public:
  using ManyChainsOf::ManyChainsOf;
  static constexpr const char* kSampler = "BAOA";

  /// m in [0, 1); the friction is α = 2 (1 - m) / (1 + m). Default: 0.9.
  TORCH_SGMCMC_ARG(double, momentum)

  /// β̂, the part of the friction's noise that the minibatches already bring:
  /// β̂ = lr N Var(ḡ) / (2T), in [0, α], equal for all coordinates. Default: 0.
  TORCH_SGMCMC_ARG(double, noise_estimate)
};

/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ - μ‖²/2. With ḡ the
/// gradient of the mean loss of a minibatch, m = momentum and α = 2 (1 - m) /
/// (1 + m),
///
///   g = ḡ + (λ/N) (θ - μ),
///   u = v - lr g,
///   v ← m u + (1 + m) √((α-β̂) lr T / (2N)) ξ,    ξ ~ N(0, I),
///   θ ← θ + (u + v) / 2    (the new v).
///
/// lr and momentum have SGHMC's meaning, and minibatches raise the temperature
/// as much. On a quadratic the variance is exact at any stable lr. More:
/// docs/samplers/baoa.md.
///
/// State: "momentum".
///
/// Reference: B. Leimkuhler and C. Matthews, Rational Construction of
/// Stochastic Numerical Methods for Molecular Sampling, AMRX 2013.
class TORCH_SGMCMC_API BAOA final : public SamplerOf<BAOAOptions> {
 public:
  using SamplerOf::SamplerOf;
};

}  // namespace torch_sgmcmc
