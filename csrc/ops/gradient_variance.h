// Running estimate of a stochastic gradient's variance, shared by CPU and CUDA.
//
//   V <- V + w ((grad - previous)^2 / 2 - V),   previous <- grad
//
// The mean is Var(grad) plus half the squared drift of the mean gradient in one
// step. A running variance would include the whole drift along the chain: twice
// the estimate on N(0, 1).
#pragma once

#include <array>
#include <cstdint>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/macros.h"

namespace torch_sgmcmc {

struct GradientVarianceCoefficients {
  template <class Call>
  explicit GradientVarianceCoefficients(const Call& number)
      : weight(number("weight")) {}

  double weight;
};

template <class Real>
class GradientVarianceUpdate {
 public:
  static constexpr std::array<Role, 3> kRoles = {Role::kGradient, Role::kState,
                                                 Role::kState};

  explicit GradientVarianceUpdate(const GradientVarianceCoefficients& c)
      : weight_(static_cast<Real>(c.weight)) {}

  SG_HOST_DEVICE bool needs_noise() const { return false; }
  SG_HOST_DEVICE bool skips(uint64_t /*step*/) const { return false; }

  SG_INLINE void operator()(Real (&x)[3], Real /*xi*/) const {
    const Real d = x[0] - x[2];
    x[1] = Fma(weight_, Fma(Real(0.5) * d, d, -x[1]), x[1]);
    x[2] = x[0];
  }

 private:
  Real weight_;
};

struct GradientVarianceStep {
  static constexpr OpSpec kSpec = {
      .op = "gradient_variance_",
      .lists = {args::kGrads,
                {"variances", Role::kState},
                {"previous", Role::kState}},
      .numbers = {{"weight", Domain::kNotNegative}}};
  using Coefficients = GradientVarianceCoefficients;
  template <class Real>
  using Update = GradientVarianceUpdate<Real>;
};

}  // namespace torch_sgmcmc
