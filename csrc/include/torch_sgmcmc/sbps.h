// The stochastic bouncy particle sampler, and pSBPS.
//
//   torch_sgmcmc::SBPS sampler(
//       net->parameters(),
//       torch_sgmcmc::SBPSOptions().num_data(50'000).sample_interval(0.5));
//   sampler.register_sample_hook([&](torch_sgmcmc::SBPS&, double time) {
//     keep(*net);
//   });
//   sampler.step([&] {
//     auto batch = draw_minibatch();  // a fresh, independent one at each call
//     return cross_entropy(net->forward(batch.data), batch.target,
//                          CrossEntropyFuncOptions().reduction(torch::kNone));
//   });
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

/// Hyperparameters of SBPS: num_data, prior_precision, prior_mean, temperature
/// > 0 and seed of OptionsOf, and the following, without lr. All but the prior
/// are equal in all groups.
class TORCH_SGMCMC_API SBPSOptions : public OptionsOf<SBPSOptions> {
 public:
  static constexpr const char* kSampler = "SBPS";

  // The particle has unit speed.
  SBPSOptions& lr(double value) = delete;

  /// k >= 0, half width of the prediction band in standard deviations: a larger
  /// one has less bias and more proposals; the paper has 3. Default: 5.
  TORCH_SGMCMC_ARG(double, num_std)

  /// Decay >= 0 of the weights of observations in the regression, per length
  /// 1 / √b of the trajectory, b the scale of slopes: for targets whose slope
  /// changes along a line. Default: 0.
  TORCH_SGMCMC_ARG(double, observation_decay)

  /// Rate, per trajectory time, of drawing a new velocity; >= 0. Default: 0.
  TORCH_SGMCMC_ARG(double, refresh_rate)

  /// pSBPS. Default: false.
  TORCH_SGMCMC_ARG(bool, preconditioned)

  /// True if the preconditioner is learned. Default: true.
  TORCH_SGMCMC_ARG(bool, adapt)

  /// True if V learns from every minibatch, not only at bounces. A is updated
  /// at bounces and refreshments. Default: false.
  TORCH_SGMCMC_ARG(bool, adapt_every_step)

  /// Decay of the preconditioner's running mean, in [0, 1). Default: 0.99.
  TORCH_SGMCMC_ARG(double, decay)

  /// ε > 0 of the preconditioner. Default: 1e-4.
  TORCH_SGMCMC_ARG(double, eps)

  /// Trajectory time between two samples, > 0. Default: none, no samples.
  TORCH_SGMCMC_ARG(std::optional<double>, sample_interval)

  /// True if minibatches are drawn with replacement. Default: false.
  TORCH_SGMCMC_ARG(bool, replacement)

  // For torch's learning-rate schedulers: these throw std::logic_error.
  double get_lr() const override;
  void set_lr(double value) override;
};

/// Statistics of the trajectory; NaN without data.
struct SBPSDiagnostics {
  double trajectory_time;
  int64_t bounces;
  int64_t refreshments;
  double bounce_rate;           // per trajectory time
  double proposals_per_bounce;  // 1 / the rate of acceptance
  double violation_rate;        // fraction of proposals; causes the bias
  double mean_segment_length;   // between two changes of velocity
};

/// A particle moves at unit speed along straight lines, θ(t) = θ₀ + vt. With g
/// the gradient of U/T on a fresh, independent minibatch, it bounces at the
/// rate [v·g]₊,
///
///   v ← v - 2 (v·g / ‖g‖²) g,
///
/// by thinning of proposals, whose rate is the upper end of the band in which a
/// regression predicts v·g. Preconditioned, θ moves along Av and bounces with
/// Ag, A diagonal and learned.
///
/// Samples exp(-U(θ)/T), U(θ) = -Σ log p(x_i|θ) + λ‖θ - μ‖²/2, at points
/// uniform in trajectory time (register_sample_hook). Derivatives use reverse
/// mode.
///
/// step() moves the particle to its next event and observes a minibatch there.
/// The closure draws it and returns the losses of its examples, [n], n >= 2,
/// without backward(). step() returns them without a graph.
///
/// State: "origin" and "velocity"; only if preconditioned, "square_average",
/// "preconditioner" and "direction".
///
/// Reference: A. Pakman, D. Gilboa, D. Carlson and L. Paninski, Stochastic
/// Bouncy Particle Sampler, ICML 2017, algorithm 1, eq. 8 to 13, 16.
class TORCH_SGMCMC_API SBPS final : public SamplerOf<SBPSOptions> {
 public:
  using SamplerOf::SamplerOf;
  using SampleHook = std::function<void(SBPS&, double)>;

  /// Calls the hook at every multiple of sample_interval that a step passes,
  /// with the parameters at the particle's position of that time. Returns a key
  /// for remove_sample_hook.
  int64_t register_sample_hook(SampleHook hook);
  void remove_sample_hook(int64_t key);

  SBPSDiagnostics diagnostics() const;
};

}  // namespace torch_sgmcmc
