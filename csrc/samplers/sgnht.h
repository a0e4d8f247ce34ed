// The SGNHT update, shared by CPU and CUDA: SGHMC with a thermostat for each
// coordinate.
//
//   v     <- (1 - alpha) v - lr g + sqrt(2 A lr T / N) xi
//   theta <- theta + v     (the new v)
//   alpha <- alpha + kappa (u^2 N / (lr T) - 1),   u = (old v + new v) / 2,
//
// with g = grad + (lambda / N) theta and A = 1 - momentum: Ding et al. 2014,
// algorithm 2, with a thermostat for each coordinate as in Li et al. 2015.
// Noise that the minibatches bring heats v, the thermostat sees it and adds
// friction until u^2 has the mean lr T / N again: alpha settles around A +
// beta, beta = lr N Var(grad) / (2 T), which SGHMC would have to be told.
//
// The state is delta = alpha - A, and not alpha. An absolute alpha would keep
// the friction when a scheduler changes the momentum, delta keeps the noise
// account; and near 0 a float resolves the small changes, kappa = lr T / N by
// default, that it would round away near 0.1.
#pragma once

// Note [The thermostat's momentum]
// The papers write v^2 where u^2 stands above. But with the momentum first, v
// belongs to the time half a step before theta's, and for small lr its
// stationary variance is lr T / ((1 - alpha / 2) N). A thermostat that holds
// v^2 at lr T / N therefore samples at the temperature T (1 - alpha / 2),
// however small lr is: 5 % too cold for momentum 0.9. The papers escape that as
// their alpha is proportional to their step size h, here A and lr are
// independent. The mean u of the momenta before and after the gradient is the
// momentum at theta's own time: it has the variance lr T / N for every alpha.

#include <array>
#include <cmath>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/roles.h"

namespace torch_sgmcmc {

struct SGNHTCoefficients {
  SGNHTCoefficients(double lr,
                    double momentum,
                    double num_data,
                    double prior_precision,
                    double temperature,
                    double thermostat_rate)
      : lr(lr),
        momentum(momentum),
        weight_decay(prior_precision / num_data),
        heat(lr * temperature / num_data),
        // Where no momentum is to be had in equilibrium, the thermostat rests.
        rate(heat > 0 ? thermostat_rate : 0) {}

  double lr;
  double momentum;
  double weight_decay;
  double heat;  // lr T / N
  double rate;  // kappa
};

template <class Real>
class SGNHTUpdate {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kState};

  explicit SGNHTUpdate(const SGNHTCoefficients& c)
      : minus_lr_(static_cast<Real>(-c.lr)),
        momentum_(static_cast<Real>(c.momentum)),
        weight_decay_(static_cast<Real>(c.weight_decay)),
        noise_scale_(
            static_cast<Real>(std::sqrt(2 * (1 - c.momentum) * c.heat))),
        rate_(static_cast<Real>(c.rate)),
        gain_(static_cast<Real>(c.rate > 0 ? c.rate / (4 * c.heat) : 0)) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_scale_ != 0; }
  SG_HOST_DEVICE bool skips(uint64_t /*step*/) const { return false; }

  SG_INLINE void operator()(Real (&x)[4], Real xi) const {
    const Real g = Fma(weight_decay_, x[0], x[1]);
    const Real carry = momentum_ - x[3];  // 1 - alpha
    const Real v = Fma(carry, x[2], Fma(minus_lr_, g, noise_scale_ * xi));
    const Real u = x[2] + v;  // twice the mean: the gain has the quarter
    x[2] = v;
    x[0] = x[0] + v;
    x[3] = x[3] + Fma(gain_ * u, u, -rate_);
  }

 private:
  Real minus_lr_;
  Real momentum_;
  Real weight_decay_;
  Real noise_scale_;
  Real rate_;
  Real gain_;  // kappa N / (4 lr T)
};

}  // namespace torch_sgmcmc
