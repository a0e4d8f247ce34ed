// The pSGLD update, shared by CPU and CUDA.
//
//   V     <- a V + (1 - a) grad^2,   G = 1 / (sqrt(V) + e)   (elementwise)
//   theta <- theta - lr G g + (lr T / N) Gamma + sqrt(2 lr T G / N) xi
//
// with g = grad + (lambda / N) (theta - mu), a = decay and e = LeastRoot(): Li,
// Chen, Carlson and Carin 2016, algorithm 1. With V frozen it is SGLD with a
// step size for each coordinate; while V adapts, the target needs Gamma.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/op_spec.h"
#include "ops/posterior_gradient.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/counter.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// Note [Gamma of a running mean]
//   Gamma = dG/dV W,   W_t = a J_{t - 1} W_{t - 1} + 2 (1 - a) grad h_t,
// with h_t = d grad / d theta of the same minibatch and J = 1 - lr G h clipped
// to [0, 1 / a], so that W cannot grow by itself (docs/samplers/psgld.md).

// The number that is added to sqrt(V): eps, unless the prior's part of a step
// were more than a tenth of theta - mu where V is 0. Python has the same
// (least_root in torch_sgmcmc/core/hyperparams.py).
inline double LeastRoot(double eps, double lr, double weight_decay) {
  return std::max(eps, 10 * lr * weight_decay);
}

double LeastRoot(const auto& number) {
  return LeastRoot(number("eps"), number("lr"), WeightDecay(number));
}

// The move with a given G: the last lines of all three variants.
template <class Real>
class PSGLDMove {
 public:
  explicit PSGLDMove(const auto& number)
      : minus_lr_(static_cast<Real>(-number("lr"))),
        weight_decay_(static_cast<Real>(WeightDecay(number))),
        noise_scale_(
            static_cast<Real>(std::sqrt(2 * ScaledTemperature(number)))),
        prior_mean_(static_cast<Real>(number("prior_mean"))) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_scale_ != 0; }
  SG_HOST_DEVICE Real prior_mean() const { return prior_mean_; }

  // theta after the move, without Gamma.
  SG_INLINE Real Theta(Real theta, Real mean, Real grad, Real root_of_g,
                       Real xi) const {
    const Real g = Fma(weight_decay_, theta - mean, grad);
    const Real step =
        root_of_g * Fma(minus_lr_ * root_of_g, g, noise_scale_ * xi);
    return theta + step;
  }

  // 1 - lr G h, h the curvature of g.
  SG_INLINE Real Jacobian(Real g_factor, Real curvature) const {
    return Fma(minus_lr_ * g_factor, curvature + weight_decay_, Real(1));
  }

 private:
  Real minus_lr_;
  Real weight_decay_;
  Real noise_scale_;
  Real prior_mean_;
};

// A frozen G is given as its root, which saves two roots per element.
template <class Real>
class PSGLDFrozenUpdate : public PSGLDMove<Real> {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kParameter, Role::kGradient, Role::kStatistic, Role::kPriorMean};

  using PSGLDMove<Real>::PSGLDMove;

  SG_INLINE void operator()(Real (&x)[4], Real xi) const {
    x[0] = this->Theta(x[0], x[3], x[1], x[2], xi);
  }
};

// V adapts, Gamma is skipped.
template <class Real>
class PSGLDAdaptingUpdate : public PSGLDMove<Real> {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kPriorMean};

  explicit PSGLDAdaptingUpdate(const auto& number)
      : PSGLDMove<Real>(number),
        eps_(static_cast<Real>(LeastRoot(number))),
        decay_(static_cast<Real>(number("decay"))),
        weight_(static_cast<Real>(1 - number("decay"))) {}

  SG_INLINE void operator()(Real (&x)[4], Real xi) const {
    x[2] = Fma(weight_ * x[1], x[1], decay_ * x[2]);
    const Real root_of_g = ReciprocalRoot(SquareRoot(x[2]) + eps_);
    x[0] = this->Theta(x[0], x[3], x[1], root_of_g, xi);
  }

 private:
  Real eps_;
  Real decay_;
  Real weight_;
};

// V adapts, and its sensitivity to theta, from which Gamma follows (Note [Gamma
// of a running mean]). The state is J W. The second gradient is the diagonal of
// the minibatch's Hessian.
template <class Real>
class PSGLDCorrectedUpdate : public PSGLDMove<Real> {
 public:
  static constexpr std::array<Role, 6> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState,
      Role::kState,     Role::kGradient, Role::kPriorMean};

  explicit PSGLDCorrectedUpdate(const auto& number)
      : PSGLDMove<Real>(number),
        eps_(static_cast<Real>(LeastRoot(number))),
        decay_(static_cast<Real>(number("decay"))),
        weight_(static_cast<Real>(1 - number("decay"))),
        minus_half_scaled_temperature_(
            static_cast<Real>(-0.5 * ScaledTemperature(number))),
        largest_jacobian_(
            static_cast<Real>(number("decay") > 0 ? 1 / number("decay") : 1)) {}

  SG_INLINE void operator()(Real (&x)[6], Real xi) const {
    const Real weighted = weight_ * x[1];
    x[2] = Fma(weighted, x[1], decay_ * x[2]);
    const Real w = Fma(weighted + weighted, x[4], decay_ * x[3]);
    const Real root = SquareRoot(x[2]);
    const Real root_of_g = ReciprocalRoot(root + eps_);
    const Real g = root_of_g * root_of_g;
    // dG/dV = -G^2 / (2 sqrt(V)). V = 0 only if all squares of gradients were
    // 0, and then W is 0 or tiny.
    const Real slope = w / (root + Real(0x1p-63));
    const Real gamma = minus_half_scaled_temperature_ * (g * g) * slope;
    x[0] = this->Theta(x[0], x[5], x[1], root_of_g, xi) + gamma;
    Real jacobian = this->Jacobian(g, x[4]);
    jacobian = jacobian > 0 ? jacobian : Real(0);
    jacobian = jacobian < largest_jacobian_ ? jacobian : largest_jacobian_;
    x[3] = w * jacobian;
  }

 private:
  Real eps_;
  Real decay_;
  Real weight_;
  Real minus_half_scaled_temperature_;
  Real largest_jacobian_;
};

struct PSGLDStep {
  static constexpr OpSpec kSpec = {
      .op = "psgld_step_",
      .lists = {args::kParams,
                args::kGrads,
                {.name = "square_averages",
                 .role = Role::kState,
                 .key = "square_average"},
                {.name = "sensitivities",
                 .role = Role::kState,
                 .is_optional = true,
                 .key = "sensitivity"},
                {"curvatures", Role::kGradient, /*is_optional=*/true},
                args::kMasterList},
      .numbers = {args::kLr, args::kNumData, args::kPriorPrecision,
                  args::kTemperature, args::kDecay, args::kEps},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};

  static void Apply(const auto& driver, const auto& /*plan*/, const auto& call,
                    const NoiseStream& stream) {
    if (call.list("sensitivities").empty()) {
      driver.template Apply<PSGLDAdaptingUpdate>(call, stream);
    } else {
      driver.template Apply<PSGLDCorrectedUpdate>(call, stream);
    }
  }
};

struct PSGLDFrozenStep : UpdatedBy<PSGLDFrozenUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "psgld_frozen_step_",
      .lists = {args::kParams,
                args::kGrads,
                {"roots", Role::kStatistic},
                args::kMasterList},
      .numbers = {args::kLr, args::kNumData, args::kPriorPrecision,
                  args::kTemperature},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};
};

}  // namespace torch_sgmcmc
