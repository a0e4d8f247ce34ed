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

template <class Real>
class GradientVarianceUpdate {
 public:
  static constexpr std::array<Role, 3> kRoles = {Role::kGradient, Role::kState,
                                                 Role::kState};

  template <class Call>
  explicit GradientVarianceUpdate(const Call& number)
      : weight_(static_cast<Real>(number("weight"))) {}

  SG_INLINE void operator()(Real (&x)[3], Real /*xi*/) const {
    const Real d = x[0] - x[2];
    x[1] = Fma(weight_, Fma(Real(0.5) * d, d, -x[1]), x[1]);
    x[2] = x[0];
  }

 private:
  Real weight_;
};

struct GradientVarianceStep : UpdatedBy<GradientVarianceUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "gradient_variance_",
      .lists = {args::kGrads,
                {"variances", Role::kState},
                {"previous", Role::kState}},
      .numbers = {{"weight", Domain::kNotNegative}}};
};

}  // namespace torch_sgmcmc
