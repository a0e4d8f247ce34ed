// Gibbs updates of prior precisions: a Gamma hyperprior for every param group.
//
//   torch_sgmcmc::GammaPrecision precision(sampler);
//   for (int epoch = 0; epoch < epochs; ++epoch) {
//     train_one_epoch(net, sampler);
//     precision.step();
//   }
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "torch_sgmcmc/sampler.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

/// The hyperprior: λ ~ Gamma(shape, rate). Both default to 1.
struct GammaPrecisionOptions {
  /// a > 0.
  GammaPrecisionOptions& shape(double value) {
    shape_ = value;
    return *this;
  }
  double shape() const { return shape_; }
  /// b > 0.
  GammaPrecisionOptions& rate(double value) {
    rate_ = value;
    return *this;
  }
  double rate() const { return rate_; }

 private:
  double shape_ = 1;
  double rate_ = 1;
};

/// Draws every group's prior_precision λ from its full conditional given the
/// group's d parameters θ,
///
///   λ | θ ~ Gamma(a + d/2, rate b + ‖θ‖²/2),
///
/// and at temperature T from Gamma((a + d/2 - 1)/T + 1, rate (b + ‖θ‖²/2)/T).
/// For a precision per layer, give each layer a param group. Draws are keyed by
/// the sampler's seed and the number of updates. With SBPS, draw only after
/// refreshments: at bounces its θ is not a draw of the posterior.
///
/// Reference: T. Chen, E. B. Fox and C. Guestrin, Stochastic Gradient
/// Hamiltonian Monte Carlo, ICML 2014, section 4.2.
class TORCH_SGMCMC_API GammaPrecision {
 public:
  /// Throws std::invalid_argument if shape or rate is out of range. The sampler
  /// may be moved.
  explicit GammaPrecision(Sampler& sampler,
                          const GammaPrecisionOptions& options = {});

  // A copy would draw the same numbers again.
  GammaPrecision(const GammaPrecision&) = delete;
  GammaPrecision(GammaPrecision&&) = default;
  GammaPrecision& operator=(const GammaPrecision&) = delete;
  GammaPrecision& operator=(GammaPrecision&&) = default;
  ~GammaPrecision() = default;

  /// Draws every group's prior_precision, given its parameters that require a
  /// gradient, and returns the new values. Throws std::invalid_argument at
  /// temperature 0, std::logic_error if the sampler has been destroyed.
  std::vector<double> step();

  int64_t num_updates() const { return num_updates_; }

  /// The counter and the hyperprior; the precisions are the sampler's.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& dict);

 private:
  double draw(size_t index) const;

  std::weak_ptr<SamplerImpl> sampler_;
  GammaPrecisionOptions options_;
  int64_t num_updates_ = 0;
};

}  // namespace torch_sgmcmc
