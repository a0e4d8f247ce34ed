// The SGNHT update, shared by CPU and CUDA: SGHMC with a thermostat for each
// coordinate.
//
//   v     <- (1 - alpha) f v - lr g + sqrt(2 A lr T / N) xi
//   theta <- theta + v     (the new v)
//   alpha <- alpha + kappa (u^2 N / (lr T) - 1),   u = (f old v + new v) / 2,
//
// with g = grad + (lambda / N) (theta - mu) and A = 1 - momentum: Ding et al.
// 2014, algorithm 2, with a thermostat for each coordinate as in Li et al.
// 2015. f is 1 unless lr, T or N have changed (host/rescaling.h). The state is
// delta = alpha - A, with its own scale. docs/samplers/sgnht.md explains delta,
// and u^2 in place of the papers' v^2.
#pragma once

#include <array>
#include <cmath>

#include "ops/op_spec.h"
#include "ops/posterior_gradient.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// kappa. Without momentum in equilibrium the thermostat rests.
double ThermostatRate(const auto& number) {
  return ScaledTemperature(number) > 0 ? number("thermostat_rate") : 0;
}

template <class Real>
class SGNHTUpdate : public PosteriorGradient<Real> {
 public:
  static constexpr std::array<Role, 5> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kState,
      Role::kPriorMean};

  explicit SGNHTUpdate(const auto& number)
      : PosteriorGradient<Real>(number),
        minus_lr_(static_cast<Real>(-number("lr"))),
        momentum_(static_cast<Real>(number("momentum"))),
        noise_scale_(static_cast<Real>(std::sqrt(2 * (1 - number("momentum")) *
                                                 ScaledTemperature(number)))),
        rate_(static_cast<Real>(ThermostatRate(number))),
        momentum_scale_(static_cast<Real>(number("momentum_scale"))),
        thermostat_scale_(static_cast<Real>(number("thermostat_scale"))),
        gain_(ThermostatRate(number) > 0
                  ? static_cast<Real>(ThermostatRate(number) /
                                      (4 * ScaledTemperature(number)))
                  : 0) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_scale_ != 0; }

  SG_INLINE void operator()(Real (&x)[5], Real xi) const {
    const Real g = this->Gradient(x[0], x[4], x[1]);
    const Real former = momentum_scale_ * x[2];
    const Real thermostat = thermostat_scale_ * x[3];
    const Real carry = momentum_ - thermostat;  // 1 - alpha
    const Real v = Fma(carry, former, Fma(minus_lr_, g, noise_scale_ * xi));
    const Real u = former + v;  // twice the mean: the gain has the quarter
    x[2] = v;
    x[0] = x[0] + v;
    x[3] = thermostat + Fma(gain_ * u, u, -rate_);
  }

 private:
  Real minus_lr_;
  Real momentum_;
  Real noise_scale_;
  Real rate_;
  Real momentum_scale_;
  Real thermostat_scale_;
  Real gain_;  // kappa N / (4 lr T)
};

struct SGNHTStep : UpdatedBy<SGNHTUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "sgnht_step_",
      .lists = {args::kParams,
                args::kGrads,
                args::kMomenta,
                {.name = "thermostats",
                 .role = Role::kState,
                 .key = "thermostat",
                 .start = Start::kZeros},
                args::kMasterList},
      .numbers = {args::kLr, args::kMomentum, args::kNumData,
                  args::kPriorPrecision, args::kTemperature,
                  args::kThermostatRate, args::kMomentumScale,
                  args::kThermostatScale},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};
};

}  // namespace torch_sgmcmc
