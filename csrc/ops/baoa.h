// The BAOA update, shared by CPU and CUDA: SGHMC with the friction between two
// halves of the drift.
//
//   u     <- f v - lr g
//   v     <- m u + sqrt((1 + m)^2 (f - beta) lr T / (2 N)) xi
//   theta <- theta + (u + v) / 2     (the new v)
//
// with f = 1 unless lr, T or N have changed (host/rescaling.h), g = grad +
// (lambda / N) (theta - mu), m the momentum and f = 2 (1 - m) / (1 + m).
// Without beta the noise is an exact Ornstein-Uhlenbeck step's: BAOAB of
// Leimkuhler and Matthews 2013, observed at its gradient. beta = lr N Var(grad)
// / (2 T) is the minibatches' noise, to first order in lr.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "ops/op_spec.h"
#include "ops/posterior_gradient.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/macros.h"

namespace torch_sgmcmc {

inline double BAOAFriction(double momentum) {
  return 2 * (1 - momentum) / (1 + momentum);
}

template <class Real>
class BAOAMove : public PosteriorGradient<Real> {
 public:
  explicit BAOAMove(const auto& number)
      : PosteriorGradient<Real>(number),
        minus_lr_(static_cast<Real>(-number("lr"))),
        momentum_(static_cast<Real>(number("momentum"))),
        momentum_scale_(static_cast<Real>(number("momentum_scale"))),
        noise_scale_(static_cast<Real>(std::sqrt(
            (1 + number("momentum")) * (1 + number("momentum")) *
            std::max(0.0, BAOAFriction(number("momentum")) -
                              number("noise_estimate")) *
            number("lr") * number("temperature") / (2 * number("num_data"))))) {
  }

  SG_HOST_DEVICE bool needs_noise() const { return noise_scale_ != 0; }

 protected:
  SG_INLINE void Move(auto& x, Real g, Real xi) const {
    const Real kicked = Fma(minus_lr_, g, momentum_scale_ * x[2]);
    x[2] = Fma(momentum_, kicked, noise_scale_ * xi);
    x[0] = Fma(Real(0.5), kicked + x[2], x[0]);
  }

 private:
  Real minus_lr_;
  Real momentum_;
  Real momentum_scale_;  // f
  Real noise_scale_;
};

template <class Real>
class BAOAUpdate : public BAOAMove<Real> {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kPriorMean};

  using BAOAMove<Real>::BAOAMove;

  SG_INLINE void operator()(Real (&x)[4], Real xi) const {
    this->Move(x, this->Gradient(x[0], x[3], x[1]), xi);
  }
};

// The same in the coordinates theta / sqrt(G), with a number G > 0 for each
// coordinate: lr G g, and sqrt(G) in the noise.
template <class Real>
class BAOAPreconditionedUpdate : public BAOAMove<Real> {
 public:
  static constexpr std::array<Role, 5> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kStatistic,
      Role::kPriorMean};

  using BAOAMove<Real>::BAOAMove;

  SG_INLINE void operator()(Real (&x)[5], Real xi) const {
    const Real g = this->Gradient(x[0], x[4], x[1]);
    this->Move(x, x[3] * g, SquareRoot(x[3]) * xi);
  }
};

struct BAOAStep : UpdatedBy<BAOAUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "baoa_step_",
      .lists = {args::kParams, args::kGrads, args::kMomenta, args::kMasterList},
      .numbers = {args::kLr, args::kMomentum, args::kNumData,
                  args::kPriorPrecision, args::kTemperature,
                  args::kNoiseEstimate, args::kMomentumScale},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};
  static std::string Refusal(const auto& call) {
    return RefusalOfEstimate(call, BAOAFriction(call("momentum")),
                             "2 (1 - momentum) / (1 + momentum)");
  }
};

struct BAOAPreconditionedStep : UpdatedBy<BAOAPreconditionedUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "baoa_preconditioned_step_",
      .lists = {args::kParams, args::kGrads, args::kMomenta,
                args::kPreconditioners, args::kMasterList},
      .numbers = BAOAStep::kSpec.numbers,
      .noise = Noise::kUpdate,
      .has_prior_mean = true};
  static std::string Refusal(const auto& call) {
    return BAOAStep::Refusal(call);
  }
};

}  // namespace torch_sgmcmc
