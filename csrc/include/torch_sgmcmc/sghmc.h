// Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014).
//
//   torch_sgmcmc::SGHMC sampler(
//       net->parameters(),
//       torch_sgmcmc::SGHMCOptions(0.03).momentum(0.9).num_data(50'000));
//
// The training loop is the one of sgld.h, and of torch::optim::SGD.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of SGHMC: ManyChainsOf's and the following.
class TORCH_SGMCMC_API SGHMCOptions : public ManyChainsOf<SGHMCOptions> {
 public:
  /// A number or "online".
  using NoiseEstimate = std::variant<double, std::string>;

  using ManyChainsOf::ManyChainsOf;
  static constexpr const char* kSampler = "SGHMC";

  /// 1 - α in [0, 1), α the friction. Default: 0.9.
  TORCH_SGMCMC_ARG(double, momentum)

  NoiseEstimate noise_estimate() const {
    const c10::IValue given = value("noise_estimate");
    if (given.isString()) return given.toStringRef();
    return given.toDouble();
  }
  /// β̂, the part of the friction's noise that the minibatches already bring:
  /// β̂ = lr N Var(ḡ) / (2T), in [0, α], equal for all coordinates. Default: 0.
  SGHMCOptions& noise_estimate(double value) {
    return set("noise_estimate", value);
  }
  /// "online": β̂ of each coordinate, from half the mean squared difference of
  /// consecutive gradients, is used after 100 gradients. A step throws if β̂ >
  /// α.
  SGHMCOptions& noise_estimate(const std::string& value) {
    return set("noise_estimate", value);
  }

  /// k >= 0; before every k-th update the momentum is drawn afresh from its
  /// stationary law given θ. 0 never does. Default: 0.
  TORCH_SGMCMC_ARG(int64_t, resample_momentum_every)

  /// "stationary" draws the first momentum from N(0, lr T / N), "zeros" starts
  /// at rest. Default: "stationary".
  TORCH_SGMCMC_ARG(std::string, initial_momentum)
};

/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ - μ‖²/2. With ḡ the
/// gradient of the mean loss of a minibatch and α = 1 - momentum,
///
///   g = ḡ + (λ/N) (θ - μ),
///   v ← (1-α) v - lr g + √(2 (α-β̂) lr T / N) ξ,    ξ ~ N(0, I),
///   θ ← θ + v    (the new v).
///
/// lr and momentum have the meaning of torch::optim::SGD's, and do not change
/// the target.
///
/// State: "momentum"; with noise_estimate("online") "grad_variance" and
/// "previous_grad".
///
/// Reference: T. Chen, E. B. Fox and C. Guestrin, Stochastic Gradient
/// Hamiltonian Monte Carlo, ICML 2014, eq. 15.
class TORCH_SGMCMC_API SGHMC final : public SamplerOf<SGHMCOptions> {
 public:
  using SamplerOf::SamplerOf;
};

}  // namespace torch_sgmcmc
