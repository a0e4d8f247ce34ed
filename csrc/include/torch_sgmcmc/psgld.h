// Preconditioned SGLD (Li, Chen, Carlson and Carin 2016): SGLD with RMSprop,
// whose adaptation ends with burn-in:
//
//   torch_sgmcmc::PSGLD sampler(
//       net->parameters(),
//       torch_sgmcmc::PSGLDOptions(1e-3).num_data(50'000));
//   ... the training loop of sgld.h; after burn-in, for every group:
//   sampler.options(group).adapt(false);
//
// Only Python has Γ, which keeps the target while V adapts.
#pragma once

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of PSGLD: ManyChainsOf's and the following.
class TORCH_SGMCMC_API PSGLDOptions : public ManyChainsOf<PSGLDOptions> {
 public:
  // Python's default of gamma is true.
  PSGLDOptions() { put("gamma", false); }
  explicit PSGLDOptions(double lr) : PSGLDOptions() { put("lr", lr); }
  static constexpr const char* kSampler = "PSGLD";

  /// a in [0, 1), the decay of V. Default: 0.99.
  TORCH_SGMCMC_ARG(double, decay)

  /// ε > 0, added to the root of V; the paper's λ. Default: 1e-5.
  TORCH_SGMCMC_ARG(double, eps)

  /// True if V follows the gradients; can be set in a group at any time.
  /// Default: true.
  TORCH_SGMCMC_ARG(bool, adapt)
};

/// A step size for each coordinate, from a running mean of squared gradients.
/// With ḡ the gradient of the mean loss of a minibatch, elementwise
///
///   V ← a V + (1-a) ḡ²,    G = 1 / (√V + ε),    g = ḡ + (λ/N) (θ - μ),
///   θ ← θ - lr G g + √(2 lr T G / N) ξ,    ξ ~ N(0, I).
///
/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ - μ‖²/2, once adapt is
/// false. Before, the chain is too wide where gradients grow in the tails
/// (docs/samplers/psgld.md).
///
/// State: "square_average", V, at first the first gradient's square.
///
/// Reference: C. Li, C. Chen, D. Carlson and L. Carin, Preconditioned
/// Stochastic Gradient Langevin Dynamics for Deep Neural Networks, AAAI 2016,
/// algorithm 1.
class TORCH_SGMCMC_API PSGLD final : public SamplerOf<PSGLDOptions> {
 public:
  using SamplerOf::SamplerOf;
};

}  // namespace torch_sgmcmc
