// Microcanonical Langevin (Robnik, De Luca, Silverstein and Seljak 2023).
//
//   torch_sgmcmc::MCLMC sampler(
//       net->parameters(),
//       torch_sgmcmc::MCLMCOptions(1e-3).momentum(0.99).num_data(1'000));
//
// The training loop is the one of sgld.h, and of torch::optim::SGD, with
// gradients of all data.
#pragma once

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of MCLMC: ManyChainsOf's and the following. lr, num_data,
/// temperature (> 0) and momentum are equal in all groups.
class TORCH_SGMCMC_API MCLMCOptions : public ManyChainsOf<MCLMCOptions> {
 public:
  using ManyChainsOf::ManyChainsOf;
  static constexpr const char* kSampler = "MCLMC";

  /// m in [0, 1), the part of the direction that a step keeps. Default: 0.9.
  TORCH_SGMCMC_ARG(double, momentum)
};

/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ - μ‖²/2. With G the
/// gradient of U / T, u a unit vector over all d sampled elements, m = momentum
/// and ε = √(lr d T / N), a step turns u by ε/2 along G, refreshes it,
///
///   u ← m u + √((1 - m²) / d) ξ, divided by its length,    ξ ~ N(0, I),
///
/// turns it by ε/2 again, and moves θ ← θ + ε u. More: docs/samplers/mclmc.md.
/// Python also finds lr and momentum; a state dict of unfinished tuning is
/// refused.
///
/// State: "direction", ε u.
///
/// Reference: J. Robnik, G. B. De Luca, E. Silverstein and U. Seljak,
/// Microcanonical Hamiltonian Monte Carlo, JMLR 2023.
class TORCH_SGMCMC_API MCLMC final : public SamplerOf<MCLMCOptions> {
 public:
  using SamplerOf::SamplerOf;

  /// The mean square of a step's energy error, per dimension, over the steps
  /// and chains of this object; NaN before the second step.
  double energy_error() const;
};

}  // namespace torch_sgmcmc
