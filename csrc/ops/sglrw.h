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

#include "ops/op_spec.h"
#include "ops/posterior_gradient.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/macros.h"

namespace torch_sgmcmc {

template <class Real>
class SGLRWUpdate : public PosteriorGradient<Real> {
 public:
  static constexpr bool kUniformNoise = true;
  static constexpr std::array<Role, 3> kRoles = {
      Role::kParameter, Role::kGradient, Role::kPriorMean};

  explicit SGLRWUpdate(const auto& number)
      : PosteriorGradient<Real>(number),
        minus_lr_(static_cast<Real>(-number("lr"))),
        delta_(static_cast<Real>(std::sqrt(
            2 * number("lr") * number("temperature") / number("num_data")))) {}

  SG_HOST_DEVICE bool needs_noise() const { return delta_ != 0; }

  SG_INLINE void operator()(Real (&x)[3], Real u) const {
    const Real move = minus_lr_ * this->Gradient(x[0], x[2], x[1]);
    const Real step = delta_ * u < move ? delta_ : -delta_;
    // Values that are not finite stay so.
    // cppcheck-suppress knownConditionTrueFalse
    x[0] = x[0] + (move * 0 == 0 ? step : move);
  }

 private:
  Real minus_lr_;
  Real delta_;
};

struct SGLRWStep : UpdatedBy<SGLRWUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "sglrw_step_",
      .lists = {args::kParams, args::kGrads, args::kMasterList},
      .numbers = {args::kLr, args::kNumData, args::kPriorPrecision,
                  args::kPositiveTemperature},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};
};

}  // namespace torch_sgmcmc
