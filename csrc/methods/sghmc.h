// The SGHMC update, shared by CPU and CUDA.
//
//   v     <- (1 - alpha) f v - lr g + sqrt(2 (alpha - beta) lr T / N) xi
//   theta <- theta + v     (the new v)
//
// with f = 1 unless lr, T or N have changed (host/rescaling.h), g = grad +
// (lambda / N) (theta - mu) and alpha = 1 - momentum: eq. 15 of Chen, Fox and
// Guestrin 2014 with eta = lr / N. beta accounts for the noise that the
// minibatch itself brings: beta = lr N Var(grad) / (2 T). If Var(grad) is given
// for each coordinate, 2 (alpha - beta) lr T / N becomes 2 alpha lr T / N -
// lr^2 Var(grad). With a mass M and a friction C of each coordinate (algorithm
// 2), lr / M, alpha C / M and beta / M take the places of lr, alpha and beta.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "core/arithmetic.h"
#include "core/counter.h"
#include "core/macros.h"
#include "core/roles.h"
#include "core/row.h"
#include "core/step_filter.h"
#include "methods/gaussian.h"
#include "methods/posterior_gradient.h"

namespace torch_sgmcmc {

// Note [Momentum drawn afresh]
// The mean of v's stationary law given theta (docs/samplers/sghmc.md) is added
// within the update that follows the draw: with m = momentum,
// m lr g / (1 + m) - lr g = -lr g / (1 + m), the part 1 / (1 + m) of its
// gradient, and with it of the minibatch's noise.

struct SGHMCCoefficients : PriorCoefficients {
  SGHMCCoefficients(double lr,
                    double momentum,
                    double num_data,
                    double prior_precision,
                    double temperature,
                    double noise_estimate,
                    double momentum_scale = 1,
                    const CommonNumbers& common = {})
      : PriorCoefficients(prior_precision, num_data, common),
        lr(lr),
        momentum(momentum),
        heat(2 * lr * temperature / num_data),
        noise_estimate(noise_estimate),
        momentum_scale(momentum_scale) {}

  // The update that follows a draw of the momentum, and its standard deviation.
  SGHMCCoefficients AfterDraw(int64_t every) const {
    SGHMCCoefficients c = *this;
    c.lr = lr / (1 + momentum);
    c.noise_estimate = noise_estimate / ((1 + momentum) * (1 + momentum));
    c.momentum_scale = 1;
    c.filter = {every, true};
    return c;
  }
  SGHMCCoefficients WithoutDraw(int64_t every) const {
    SGHMCCoefficients c = *this;
    c.filter = {every, false};
    return c;
  }
  double DrawStd() const { return std::sqrt(heat / (1 + momentum)); }

  // Variance of the injected noise.
  double NoiseVariance() const {
    return std::max(0.0, (1 - momentum) - noise_estimate) * heat;
  }

  double lr;
  double momentum;
  double heat;  // 2 lr T / N
  double noise_estimate;
  double momentum_scale;  // f
  StepFilter filter;
};

template <class Real>
class SGHMCUpdate : public PosteriorGradient<Real> {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kPriorMean};

  explicit SGHMCUpdate(const SGHMCCoefficients& c)
      : PosteriorGradient<Real>(c),
        minus_lr_(static_cast<Real>(-c.lr)),
        momentum_(static_cast<Real>(c.momentum * c.momentum_scale)),
        noise_scale_(static_cast<Real>(std::sqrt(c.NoiseVariance()))),
        filter_(c.filter) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_scale_ != 0; }
  SG_HOST_DEVICE bool skips(uint64_t step) const { return filter_.Skips(step); }

  SG_INLINE void operator()(Real (&x)[4], Real xi) const {
    const Real g = this->Gradient(x[0], x[3], x[1]);
    x[2] = Fma(momentum_, x[2], Fma(minus_lr_, g, noise_scale_ * xi));
    x[0] = x[0] + x[2];
  }

 private:
  Real minus_lr_;
  Real momentum_;
  Real noise_scale_;
  StepFilter filter_;
};

// The same with the gradient's variance known for each coordinate.
template <class Real>
class SGHMCNoiseAwareUpdate : public PosteriorGradient<Real> {
 public:
  static constexpr std::array<Role, 5> kRoles = {Role::kParameter,
                                                 Role::kGradient,
                                                 Role::kState,
                                                 Role::kStatistic,
                                                 Role::kPriorMean};

  explicit SGHMCNoiseAwareUpdate(const SGHMCCoefficients& c)
      : PosteriorGradient<Real>(c),
        minus_lr_(static_cast<Real>(-c.lr)),
        momentum_(static_cast<Real>(c.momentum * c.momentum_scale)),
        noise_variance_(static_cast<Real>(c.NoiseVariance())),
        minus_lr_squared_(static_cast<Real>(-c.lr * c.lr)),
        filter_(c.filter) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_variance_ != 0; }
  SG_HOST_DEVICE bool skips(uint64_t step) const { return filter_.Skips(step); }

  SG_INLINE void operator()(Real (&x)[5], Real xi) const {
    const Real g = this->Gradient(x[0], x[4], x[1]);
    // The caller has checked that this is not negative but for rounding.
    const Real variance = Fma(minus_lr_squared_, x[3], noise_variance_);
    const Real noise = sqrt(variance > 0 ? variance : Real(0)) * xi;
    x[2] = Fma(momentum_, x[2], Fma(minus_lr_, g, noise));
    x[0] = x[0] + x[2];
  }

 private:
  Real minus_lr_;
  Real momentum_;
  Real noise_variance_;
  Real minus_lr_squared_;
  StepFilter filter_;
};

struct SGHMCByCoordinateCoefficients {
  SGHMCByCoordinateCoefficients AfterDraw(int64_t every) const {
    return {WithFilter({every, true}), has_variance, /*is_drawn=*/true};
  }
  SGHMCByCoordinateCoefficients WithoutDraw(int64_t every) const {
    return {WithFilter({every, false}), has_variance, /*is_drawn=*/false};
  }
  SGHMCCoefficients WithFilter(StepFilter filter) const {
    SGHMCCoefficients c = group;
    c.filter = filter;
    return c;
  }

  SGHMCCoefficients group;
  bool has_variance = false;
  bool is_drawn = false;  // the momentum is a standard normal yet
};

// Arrays: theta, grad, v, Var(grad), M, C, mu. Without a variance or a C there
// is another array in its place: no part is taken of the former, and M for C
// makes a friction of alpha.
template <class Real>
class SGHMCByCoordinateUpdate : public PosteriorGradient<Real> {
 public:
  static constexpr std::array<Role, 7> kRoles = {Role::kParameter,
                                                 Role::kGradient,
                                                 Role::kState,
                                                 Role::kStatistic,
                                                 Role::kStatistic,
                                                 Role::kStatistic,
                                                 Role::kPriorMean};

  explicit SGHMCByCoordinateUpdate(const SGHMCByCoordinateCoefficients& c)
      : PosteriorGradient<Real>(c.group),
        lr_(static_cast<Real>(c.group.lr)),
        friction_(static_cast<Real>(1 - c.group.momentum)),
        heat_(static_cast<Real>(c.group.heat)),
        estimate_(static_cast<Real>(c.group.noise_estimate)),
        minus_variance_(static_cast<Real>(c.has_variance ? -1 : 0)),
        is_drawn_(c.is_drawn),
        filter_(c.group.filter) {}

  SG_HOST_DEVICE bool needs_noise() const { return heat_ != 0; }
  SG_HOST_DEVICE bool skips(uint64_t step) const { return filter_.Skips(step); }

  SG_INLINE void operator()(Real (&x)[7], Real xi) const {
    const Real g = this->Gradient(x[0], x[6], x[1]);
    const Real inverse = Real(1) / x[4];
    const Real friction = friction_ * (x[5] * inverse);
    const Real heat = heat_ * inverse;
    // Note [Momentum drawn afresh]: 1 / (1 + m), m = 1 - friction.
    const Real part = is_drawn_ ? Real(1) / (Real(2) - friction) : Real(1);
    const Real lr = lr_ * inverse * part;
    const Real estimate = estimate_ * inverse * part * part;
    // The caller has checked that this is not negative but for rounding.
    const Real variance =
        Fma(minus_variance_ * lr * lr, x[3], (friction - estimate) * heat);
    const Real noise = SquareRoot(variance > 0 ? variance : Real(0)) * xi;
    const Real v = is_drawn_ ? SquareRoot(heat * part) * x[2] : x[2];
    x[2] = Fma(Real(1) - friction, v, Fma(-lr, g, noise));
    x[0] = x[0] + x[2];
  }

 private:
  Real lr_;
  Real friction_;
  Real heat_;
  Real estimate_;
  Real minus_variance_;
  bool is_drawn_;
  StepFilter filter_;
};

inline constexpr Few<Scalar, kMaxArguments> kSGHMCNumbers = {
    rows::kLr,
    rows::kMomentum,
    rows::kNumData,
    rows::kPriorPrecision,
    rows::kTemperature,
    rows::kNoiseEstimate,
    rows::kMomentumScale,
    rows::kResampleEvery};

// The update, before every k-th of which momenta are draw_std times normals.
template <template <class> class Update,
          class Driver,
          class Plan,
          class Coefficients>
void UpdateMomenta(const Driver& driver,
                   const Plan& plan,
                   const Coefficients& coefficients,
                   const NoiseStream& stream,
                   double draw_std,
                   int64_t every) {
  if (every == 0) {
    driver.template Apply<Update>(coefficients, stream);
    return;
  }
  NoiseStream draws = stream;
  draws.purpose = static_cast<decltype(draws.purpose)>(Purpose::kMomentum);
  driver.template Apply<GaussianFill>(
      GaussianCoefficients{draw_std, {every, true}},
      draws,
      plan.ArithmeticArgument(2));
  driver.template Apply<Update>(coefficients.AfterDraw(every), stream);
  driver.template Apply<Update>(coefficients.WithoutDraw(every), stream);
}

struct SGHMCStep {
  static constexpr Row kRow = {
      .op = "sghmc_step_",
      .lists = {rows::kParams,
                rows::kGrads,
                rows::kMomenta,
                {"grad_variances", Role::kStatistic, /*is_optional=*/true},
                rows::kMasterList},
      .numbers = kSGHMCNumbers,
      .noise = Noise::kUpdate,
      .has_prior_mean = true};
  using Coefficients = SGHMCCoefficients;

  template <class Call>
  static std::string Refusal(const Call& call) {
    const double friction = 1 - call.number(1);
    const double estimate = call.number(5);
    // Up to rounding: momentum 0.9 and noise_estimate 0.1 are parts of 1.
    if (estimate <= friction + 1e-12) return "";
    return "Invalid noise_estimate: " + std::to_string(estimate) +
           " (must not exceed the friction 1 - momentum = " +
           std::to_string(friction) + ")";
  }
  template <class Driver, class Plan, class Call>
  static void Apply(const Driver& driver,
                    const Plan& plan,
                    const Call& call,
                    const NoiseStream& stream) {
    const auto c = call.template CoefficientsOf<SGHMCStep>();
    const auto update =
        call.list(3).empty()
            ? UpdateMomenta<SGHMCUpdate, Driver, Plan, SGHMCCoefficients>
            : UpdateMomenta<SGHMCNoiseAwareUpdate,
                            Driver,
                            Plan,
                            SGHMCCoefficients>;
    update(driver, plan, c, stream, c.DrawStd(), call.integer(7));
  }
};

// The same with masses, and frictions and variances where the lists have any.
// What they make of the friction is for the caller to check.
struct SGHMCByCoordinateStep {
  static constexpr Row kRow = {.op = "sghmc_by_coordinate_step_",
                               .lists = {rows::kParams,
                                         rows::kGrads,
                                         rows::kMomenta,
                                         {"grad_variances", Role::kStatistic},
                                         {"masses", Role::kStatistic},
                                         {"frictions", Role::kStatistic},
                                         rows::kMasterList},
                               .numbers = kSGHMCNumbers,
                               .noise = Noise::kUpdate,
                               .has_prior_mean = true};
  using Coefficients = SGHMCCoefficients;

  // Masses are in the places of lists that there are not, by their own name.
  template <class Call>
  static auto Lists(const Call& call) {
    const auto all = call.Arguments({});
    std::decay_t<decltype(all)> arguments;
    for (size_t i = 0; i < all.size(); ++i) {
      const bool is_there = (i != 3 && i != 5) || !call.list(i).empty();
      arguments.push_back(all[is_there ? i : 4]);
    }
    return arguments;
  }
  template <class Driver, class Plan, class Call>
  static void Apply(const Driver& driver,
                    const Plan& plan,
                    const Call& call,
                    const NoiseStream& stream) {
    const bool has_variance = !call.list(3).empty();
    UpdateMomenta<SGHMCByCoordinateUpdate>(
        driver,
        plan,
        SGHMCByCoordinateCoefficients{
            call.template CoefficientsOf<SGHMCByCoordinateStep>(),
            has_variance},
        stream,
        /*draw_std=*/1,
        call.integer(7));
  }
};

}  // namespace torch_sgmcmc
