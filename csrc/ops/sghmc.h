// The SGHMC update, shared by CPU and CUDA.
//
//   v     <- (1 - alpha) f v - lr g + sqrt(2 (alpha - beta) lr T / N) xi
//   theta <- theta + v     (the new v)
//
// with f = 1 unless lr, T or N have changed (host/rescaling.h), g = grad +
// (lambda / N) (theta - mu) and alpha = 1 - momentum: eq. 15 of Chen, Fox and
// Guestrin 2014 with eta = lr / N. beta = lr N Var(grad) / (2 T) is the
// minibatches' noise. With Var(grad) for each coordinate, 2 (alpha - beta) lr T
// / N is 2 alpha lr T / N - lr^2 Var(grad).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "ops/gaussian.h"
#include "ops/op_spec.h"
#include "ops/posterior_gradient.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/counter.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// Note [Momentum drawn afresh]
// The update after a draw adds the mean of v's stationary law given theta
// (docs/samplers/sghmc.md): with m = momentum, m lr g / (1 + m) - lr g = -lr g
// / (1 + m), the part 1 / (1 + m) of its gradient and minibatch noise.

struct SGHMCCoefficients {
  explicit SGHMCCoefficients(const auto& number)
      : weight_decay(WeightDecay(number)),
        prior_mean(number("prior_mean")),
        lr(number("lr")),
        momentum(number("momentum")),
        scaled_temperature(2 * lr * number("temperature") / number("num_data")),
        noise_estimate(number("noise_estimate")),
        momentum_scale(number("momentum_scale")) {}

  // The update after a draw of the momentum, and the momentum's std.
  SGHMCCoefficients AfterResample(int64_t every) const {
    SGHMCCoefficients c = *this;
    c.lr = lr / (1 + momentum);
    c.noise_estimate = noise_estimate / ((1 + momentum) * (1 + momentum));
    c.momentum_scale = 1;
    c.filter = {every, true};
    return c;
  }
  SGHMCCoefficients BetweenResamples(int64_t every) const {
    SGHMCCoefficients c = *this;
    c.filter = {every, false};
    return c;
  }
  double DrawStd() const {
    return std::sqrt(scaled_temperature / (1 + momentum));
  }

  // Variance of the injected noise.
  double NoiseVariance() const {
    return std::max(0.0, (1 - momentum) - noise_estimate) * scaled_temperature;
  }

  double weight_decay;
  double prior_mean;
  double lr;
  double momentum;
  double scaled_temperature;  // 2 lr T / N
  double noise_estimate;
  double momentum_scale;  // f
  EveryKSteps filter;
};

template <class Real>
class SGHMCMove : public PosteriorGradient<Real> {
 public:
  explicit SGHMCMove(const SGHMCCoefficients& c)
      : PosteriorGradient<Real>(c.weight_decay, c.prior_mean),
        minus_lr_(static_cast<Real>(-c.lr)),
        momentum_(static_cast<Real>(c.momentum * c.momentum_scale)),
        noise_scale_(static_cast<Real>(std::sqrt(c.NoiseVariance()))),
        filter_(c.filter) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_scale_ != 0; }
  SG_HOST_DEVICE bool skips(uint64_t step) const { return filter_.Skips(step); }

 protected:
  SG_INLINE void Move(auto& x, Real g, Real xi) const {
    MoveWith(noise_scale_ * xi, x, g);
  }
  SG_INLINE void MoveWith(Real noise, auto& x, Real g) const {
    x[2] = Fma(momentum_, x[2], Fma(minus_lr_, g, noise));
    x[0] = x[0] + x[2];
  }

 private:
  Real minus_lr_;
  Real momentum_;
  Real noise_scale_;
  EveryKSteps filter_;
};

template <class Real>
class SGHMCUpdate : public SGHMCMove<Real> {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kPriorMean};

  using SGHMCMove<Real>::SGHMCMove;

  SG_INLINE void operator()(Real (&x)[4], Real xi) const {
    this->Move(x, this->Gradient(x[0], x[3], x[1]), xi);
  }
};

// The same with the gradient's variance known for each coordinate.
template <class Real>
class SGHMCNoiseAwareUpdate : public SGHMCMove<Real> {
 public:
  static constexpr std::array<Role, 5> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kStatistic,
      Role::kPriorMean};

  explicit SGHMCNoiseAwareUpdate(const SGHMCCoefficients& c)
      : SGHMCMove<Real>(c),
        noise_variance_(static_cast<Real>(c.NoiseVariance())),
        minus_lr_squared_(static_cast<Real>(-c.lr * c.lr)) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_variance_ != 0; }

  SG_INLINE void operator()(Real (&x)[5], Real xi) const {
    const Real g = this->Gradient(x[0], x[4], x[1]);
    // Not negative up to rounding, as the caller has checked.
    const Real variance = Fma(minus_lr_squared_, x[3], noise_variance_);
    this->MoveWith(sqrt(variance > 0 ? variance : Real(0)) * xi, x, g);
  }

 private:
  Real noise_variance_;
  Real minus_lr_squared_;
};

// The same in the coordinates theta / sqrt(G), with a number G > 0 for each
// coordinate: lr G g, and sqrt(G) in the noise.
template <class Real>
class SGHMCPreconditionedUpdate : public SGHMCMove<Real> {
 public:
  static constexpr std::array<Role, 5> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kStatistic,
      Role::kPriorMean};

  explicit SGHMCPreconditionedUpdate(const auto& number)
      : SGHMCMove<Real>(SGHMCCoefficients(number)) {}

  SG_INLINE void operator()(Real (&x)[5], Real xi) const {
    const Real g = this->Gradient(x[0], x[4], x[1]);
    this->Move(x, x[3] * g, SquareRoot(x[3]) * xi);
  }
};

// The update, with momenta drawn before every k-th step.
template <template <class> class Update, class Driver, class Plan>
void UpdateMomenta(const Driver& driver, const Plan& plan,
                   const SGHMCCoefficients& coefficients,
                   const NoiseStream& stream, int64_t every) {
  if (every == 0) {
    driver.template Apply<Update>(coefficients, stream);
    return;
  }
  NoiseStream draws = stream;
  draws.purpose = static_cast<decltype(draws.purpose)>(Purpose::kMomentum);
  driver.template Apply<GaussianFill>(
      GaussianCoefficients{coefficients.DrawStd(), {every, true}}, draws,
      plan.ArithmeticArgument(2));
  driver.template Apply<Update>(coefficients.AfterResample(every), stream);
  driver.template Apply<Update>(coefficients.BetweenResamples(every), stream);
}

struct SGHMCStep {
  static constexpr OpSpec kSpec = {
      .op = "sghmc_step_",
      .lists = {args::kParams,
                args::kGrads,
                args::kMomenta,
                {"grad_variances", Role::kStatistic, /*is_optional=*/true},
                args::kMasterList},
      .numbers = {args::kLr, args::kMomentum, args::kNumData,
                  args::kPriorPrecision, args::kTemperature,
                  args::kNoiseEstimate, args::kMomentumScale,
                  args::kResampleEvery},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};

  static std::string Refusal(const auto& call) {
    return RefusalOfEstimate(call, 1 - call("momentum"), "1 - momentum");
  }
  template <class Driver, class Plan>
  static void Apply(const Driver& driver, const Plan& plan, const auto& call,
                    const NoiseStream& stream) {
    const SGHMCCoefficients c(call);
    const auto update =
        call.list("grad_variances").empty()
            ? UpdateMomenta<SGHMCUpdate, Driver, Plan>
            : UpdateMomenta<SGHMCNoiseAwareUpdate, Driver, Plan>;
    update(driver, plan, c, stream, call.integer("resample_momentum_every"));
  }
};

struct SGHMCPreconditionedStep : UpdatedBy<SGHMCPreconditionedUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "sghmc_preconditioned_step_",
      .lists = {args::kParams, args::kGrads, args::kMomenta,
                args::kPreconditioners, args::kMasterList},
      .numbers = {args::kLr, args::kMomentum, args::kNumData,
                  args::kPriorPrecision, args::kTemperature,
                  args::kNoiseEstimate, args::kMomentumScale},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};
  static std::string Refusal(const auto& call) {
    return SGHMCStep::Refusal(call);
  }
};

}  // namespace torch_sgmcmc
