// SGHMC with exponentially weighted stochastic gradients.
//
//   torch_sgmcmc::EWSG sampler(
//       net->parameters(),
//       torch_sgmcmc::EWSGOptions(0.03).momentum(0.9).num_data(50'000));
//   sampler.step([&] {
//     auto batch = draw_minibatch();  // a fresh one at each call, uniform
//     auto loss = cross_entropy(net->forward(batch.data), batch.target);
//     loss.backward();
//     return loss;
//   });
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of EWSG: OptionsOf's (temperature > 0, not capturable) and
/// the following.
class TORCH_SGMCMC_API EWSGOptions : public OptionsOf<EWSGOptions> {
 public:
  using OptionsOf::OptionsOf;
  static constexpr const char* kSampler = "EWSG";

  /// 1 - α in [0, 1), α the friction. 0 is the overdamped variant, with SGLD's
  /// update. Default: 0.9.
  TORCH_SGMCMC_ARG(double, momentum)

  /// The new momentum's surrogate in the weights: "momentum", "zero", "one" or
  /// "full_momentum" (the paper's figure 1c). Default: "momentum".
  TORCH_SGMCMC_ARG(std::string, surrogate)

  /// M >= 0, the number of further minibatches of a step; 0 is SGHMC. Equal in
  /// all groups. Default: 1.
  TORCH_SGMCMC_ARG(int64_t, index_chain_length)

  /// K runs K independent chains: every parameter has a leading dimension K,
  /// and the closure returns the sum of the chains' losses. Equal in all
  /// groups. Default: none, one chain.
  TORCH_SGMCMC_ARG(std::optional<int64_t>, num_chains)
};

/// Draws each update's minibatch with weights exp(W), for which the update has
/// the law of the full gradient's. With g and α as for SGHMC,
///
///   W(g) = N / (4 α lr T) ‖α v + lr g‖²,    summed over all parameters.
///
/// A step draws a minibatch, then index_chain_length times another one, whose
/// gradient g' replaces g with probability min(1, exp(W(g') - W(g))), and makes
/// SGHMC's update with the last g.
///
/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ - μ‖²/2, up to an error
/// of the order of lr and a rest of the minibatch noise.
///
/// step() calls the closure index_chain_length + 1 times, each with cleared
/// gradients and for a fresh minibatch, and returns the first loss. The
/// parameters then have the gradients of the update. It throws if the first
/// 100 proposals all have the previous minibatch's gradient.
///
/// State: "momentum".
///
/// Reference: Improving Sampling Accuracy of Stochastic Gradient MCMC Methods
/// via Non-uniform Subsampling of Gradients (2021), algorithm 1.
class TORCH_SGMCMC_API EWSG final : public SamplerOf<EWSGOptions> {
 public:
  using SamplerOf::SamplerOf;

  /// The fraction of proposed minibatches that was accepted; NaN before any.
  double acceptance_rate() const;
};

}  // namespace torch_sgmcmc
