// The SGLD update, shared by CPU and CUDA.
//
//   theta <- theta - lr g + sqrt(2 lr T / N) xi
//
// with g = grad + (lambda / N) (theta - mu): Welling and Teh 2011, eq. 4, with
// their step size 2 lr / N.
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
class SGLDUpdate : public PosteriorGradient<Real> {
 public:
  static constexpr std::array<Role, 3> kRoles = {
      Role::kParameter, Role::kGradient, Role::kPriorMean};

  explicit SGLDUpdate(const auto& number)
      : PosteriorGradient<Real>(number),
        minus_lr_(static_cast<Real>(-number("lr"))),
        noise_scale_(static_cast<Real>(std::sqrt(
            2 * number("lr") * number("temperature") / number("num_data")))) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_scale_ != 0; }

  SG_INLINE void operator()(Real (&x)[3], Real xi) const {
    const Real g = this->Gradient(x[0], x[2], x[1]);
    x[0] = Fma(noise_scale_, xi, Fma(minus_lr_, g, x[0]));
  }

 private:
  Real minus_lr_;
  Real noise_scale_;
};

struct SGLDStep : UpdatedBy<SGLDUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "sgld_step_",
      .lists = {args::kParams, args::kGrads, args::kMasterList},
      .numbers = {args::kLr, args::kNumData, args::kPriorPrecision,
                  args::kTemperature},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};
};

}  // namespace torch_sgmcmc
