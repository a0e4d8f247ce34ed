// The SGLD update, shared by CPU and CUDA.
//
//   theta <- theta - lr g + sqrt(2 lr T / N) xi
//
// with g = grad + (lambda / N) theta: Welling and Teh 2011, eq. 4, with their
// step size 2 lr / N.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/roles.h"

namespace torch_sgmcmc {

struct SGLDCoefficients {
  SGLDCoefficients(double lr,
                   double num_data,
                   double prior_precision,
                   double temperature)
      : lr(lr),
        weight_decay(prior_precision / num_data),
        noise_scale(std::sqrt(2 * lr * temperature / num_data)) {}

  double lr;
  double weight_decay;
  double noise_scale;
};

template <class Real>
class SGLDUpdate {
 public:
  static constexpr std::array<Role, 2> kRoles = {Role::kParameter,
                                                 Role::kGradient};

  explicit SGLDUpdate(const SGLDCoefficients& c)
      : minus_lr_(static_cast<Real>(-c.lr)),
        weight_decay_(static_cast<Real>(c.weight_decay)),
        noise_scale_(static_cast<Real>(c.noise_scale)) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_scale_ != 0; }
  SG_HOST_DEVICE bool skips(uint64_t /*step*/) const { return false; }

  SG_INLINE void operator()(Real (&x)[2], Real xi) const {
    const Real g = Fma(weight_decay_, x[0], x[1]);
    x[0] = Fma(noise_scale_, xi, Fma(minus_lr_, g, x[0]));
  }

 private:
  Real minus_lr_;
  Real weight_decay_;
  Real noise_scale_;
};

}  // namespace torch_sgmcmc
