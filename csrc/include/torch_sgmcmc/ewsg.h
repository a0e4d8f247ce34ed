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

/// Hyperparameters of EWSG: OptionsOf's (temperature > 0, not
/// capturable), and the following.
class TORCH_SGMCMC_API EWSGOptions : public OptionsOf<EWSGOptions> {
 public:
  using OptionsOf::OptionsOf;
  static constexpr const char* kSampler = "EWSG";

  /// 1 - α in [0, 1); α is the friction. 0 is the overdamped variant: no
  /// momentum is kept, and the update is SGLD's. Default: 0.9.
  TORCH_SGMCMC_ARG(double, momentum)

  /// What stands for the new momentum in the weights: "momentum", "zero", "one"
  /// or "full_momentum", the choices of the paper's figure 1c. Default:
  /// "momentum".
  TORCH_SGMCMC_ARG(std::string, surrogate)

  /// M >= 0, the number of further minibatches that a step draws; with 0 the
  /// chain is SGHMC's. For the whole sampler. Default: 1.
  TORCH_SGMCMC_ARG(int64_t, index_chain_length)

  /// K makes K independent chains at once: every parameter has a leading
  /// dimension K, and the closure returns the sum of the chains' losses. For
  /// the whole sampler. Default: none, one chain.
  TORCH_SGMCMC_ARG(std::optional<int64_t>, num_chains)
};

/// The minibatch of each update is drawn with weights exp(W) that let the
/// update with a minibatch follow the law of the update with the full gradient.
/// With g and α as for SGHMC,
///
///   W(g) = N / (4 α lr T) ‖α v + lr g‖²,    summed over all parameters.
///
/// One step draws a minibatch, then index_chain_length times another one, with
/// gradient g', which replaces the current one with probability
/// min(1, exp(W(g') - W(g))), and makes one update of SGHMC with the gradient
/// that is left.
///
/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ‖²/2, up to an error of
/// the order of lr and what the weights leave of the minibatch noise.
///
/// step() draws minibatches, chooses one of them and makes one update with it.
/// Its closure is called index_chain_length + 1 times and must draw a fresh
/// minibatch each time; the gradients are cleared before. It returns the loss
/// of the first. After the step the parameters' gradients are those used. It
/// throws if the first 100 proposals all had the gradient of the minibatch
/// before.
///
/// State: "momentum".
///
/// Reference: Improving Sampling Accuracy of Stochastic Gradient MCMC Methods
/// via Non-uniform Subsampling of Gradients (2021), algorithm 1.
class TORCH_SGMCMC_API EWSG final : public SamplerOf<EWSGOptions> {
 public:
  using SamplerOf::SamplerOf;

  /// The part of all proposed minibatches that was accepted; NaN before any.
  double acceptance_rate() const;
};

}  // namespace torch_sgmcmc
