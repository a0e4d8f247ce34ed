// Stochastic gradient Nosé-Hoover thermostats (Ding et al. 2014), multivariate.
//
//   torch_sgmcmc::SGNHT sampler(
//       net->parameters(),
//       torch_sgmcmc::SGNHTOptions(0.1).momentum(0.9).num_data(50'000));
//
// The training loop is the one of sgld.h, and of torch::optim::SGD.
#pragma once

#include <optional>

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of SGNHT: ManyChainsOf's and the following.
class TORCH_SGMCMC_API SGNHTOptions : public ManyChainsOf<SGNHTOptions> {
 public:
  using ManyChainsOf::ManyChainsOf;
  static constexpr const char* kSampler = "SGNHT";

  /// 1 - A in [0, 1), A the injected noise and the initial friction. Default:
  /// 0.9.
  TORCH_SGMCMC_ARG(double, momentum)

  /// κ >= 0, the friction's rate of adaptation, within about (A + β̂) / κ steps;
  /// 0 is SGHMC. Default: lr T / N, the papers' unit thermostat mass.
  TORCH_SGMCMC_ARG(std::optional<double>, thermostat_rate)
};

/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ - μ‖²/2, with a
/// thermostat for each coordinate that adapts the friction α, A at first. With
/// ḡ the gradient of the mean loss of a minibatch and A = 1 - momentum,
/// elementwise
///
///   g = ḡ + (λ/N) (θ - μ),
///   v ← (1-α) v - lr g + √(2 A lr T / N) ξ,    ξ ~ N(0, I),
///   θ ← θ + v    (the new v),
///   α ← α + κ (u² N / (lr T) - 1),    u = (old v + new v) / 2,
///
/// This absorbs minibatch noise that is Gaussian, independent between
/// coordinates and equal for all θ. More: docs/samplers/sgnht.md.
///
/// State: "momentum"; "thermostat", α - A, whose time average estimates β̂.
///
/// Reference: N. Ding et al., Bayesian Sampling Using Stochastic Gradient
/// Thermostats, NIPS 2014, algorithm 2; C. Li et al., High-Order Stochastic
/// Gradient Thermostats, AAAI 2016 (one thermostat a coordinate).
class TORCH_SGMCMC_API SGNHT final : public SamplerOf<SGNHTOptions> {
 public:
  using SamplerOf::SamplerOf;
};

}  // namespace torch_sgmcmc
