// The SGLRW update, shared by CPU and CUDA: a walk on a lattice.
//
//   theta <- theta + delta  with probability (1 - clip(lr g / delta)) / 2,
//   theta <- theta - delta  else,      delta = sqrt(2 lr T / N),
//
// with g = grad + (lambda / N) (theta - mu) and clip(x) within [-1, 1]: Mensch
// et al. 2026. With u uniform on (-1, 1), up is where delta u < -lr g, which
// clips by itself.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/roles.h"
#include "core/row.h"

namespace torch_sgmcmc {

struct SGLRWCoefficients {
  SGLRWCoefficients(double lr,
                    double num_data,
                    double prior_precision,
                    double temperature,
                    double prior_mean = 0)
      : lr(lr),
        weight_decay(prior_precision / num_data),
        delta(std::sqrt(2 * lr * temperature / num_data)),
        prior_mean(prior_mean) {}

  double lr;
  double weight_decay;
  double delta;
  double prior_mean;  // mu, where there is no array of it
};

template <class Real>
class SGLRWUpdate {
 public:
  static constexpr bool kUniformNoise = true;
  static constexpr std::array<Role, 3> kRoles = {
      Role::kParameter, Role::kGradient, Role::kPriorMean};

  explicit SGLRWUpdate(const SGLRWCoefficients& c)
      : minus_lr_(static_cast<Real>(-c.lr)),
        weight_decay_(static_cast<Real>(c.weight_decay)),
        delta_(static_cast<Real>(c.delta)),
        prior_mean_(static_cast<Real>(c.prior_mean)) {}

  SG_HOST_DEVICE bool needs_noise() const { return delta_ != 0; }
  SG_HOST_DEVICE bool skips(uint64_t /*step*/) const { return false; }
  SG_HOST_DEVICE Real prior_mean() const { return prior_mean_; }

  SG_INLINE void operator()(Real (&x)[3], Real u) const {
    const Real move = minus_lr_ * Fma(weight_decay_, x[0] - x[2], x[1]);
    const Real step = delta_ * u < move ? delta_ : -delta_;
    // What is not finite is not to walk on as if it were.
    // cppcheck-suppress knownConditionTrueFalse
    x[0] = x[0] + (move * 0 == 0 ? step : move);
  }

 private:
  Real minus_lr_;
  Real weight_decay_;
  Real delta_;
  Real prior_mean_;
};

struct SGLRWStep {
  static constexpr Row kRow = {
      .op = "sglrw_step_",
      .lists = {rows::kParams, rows::kGrads, rows::kMasterList},
      .numbers = {rows::kLr,
                  rows::kNumData,
                  rows::kPriorPrecision,
                  rows::kPositiveTemperature},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};
  using Coefficients = SGLRWCoefficients;
  template <class Real>
  using Update = SGLRWUpdate<Real>;
};

}  // namespace torch_sgmcmc
