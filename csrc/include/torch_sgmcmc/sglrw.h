// Stochastic gradient lattice random walk (Mensch et al. 2026).
//
//   torch_sgmcmc::SGLRW sampler(
//       net->parameters(), torch_sgmcmc::SGLRWOptions(0.5).num_data(50'000));
//
// The training loop is the one of sgld.h, and of torch::optim::SGD.
#pragma once

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of SGLRW: SGLD's, with a temperature > 0.
class TORCH_SGMCMC_API SGLRWOptions : public ManyChainsOf<SGLRWOptions> {
 public:
  using ManyChainsOf::ManyChainsOf;
  static constexpr const char* kSampler = "SGLRW";
};

/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ - μ‖²/2, by steps of one
/// length. With ḡ the gradient of the mean loss of a minibatch and
/// δ = √(2 lr T / N), each coordinate by itself,
///
///   g = ḡ + (λ/N) (θ - μ),
///   θ ← θ ± δ,    up with probability (1 - clip(lr g / δ, -1, 1)) / 2.
///
/// Without clipping, minibatches do not raise the temperature, and on a
/// quadratic the variance is exact at any lr. Python's TemperatureMonitor has
/// the clipped fraction. More: docs/samplers/sglrw.md.
///
/// Reference: T. Mensch et al., 2026, arXiv 2602.15925.
class TORCH_SGMCMC_API SGLRW final : public SamplerOf<SGLRWOptions> {
 public:
  using SamplerOf::SamplerOf;
};

}  // namespace torch_sgmcmc
