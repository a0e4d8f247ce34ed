// Updates of minibatches' gradients and of their statistics, and elementary
// functions of tensors, shared by CPU and CUDA.
#pragma once

#include <array>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// The gradient of a minibatch with a control variate:
//
//   g <- (g - a) + f,
//
// with the minibatch's gradients g at theta and a at an anchor theta*, and the
// full data's gradient f at the anchor (Baker et al. 2017; Dubey et al. 2016).
// The difference comes first: at the anchor g is exactly f. Tensor operations
// would pass over memory six times, not four, and round the difference to bf16.
template <class Real>
class ControlVariateUpdate {
 public:
  static constexpr std::array<Role, 3> kRoles = {
      Role::kInPlace, Role::kGradient, Role::kStatistic};

  explicit ControlVariateUpdate(const auto& /*none*/) {}

  SG_INLINE void operator()(Real (&x)[3], Real /*xi*/) const {
    x[0] = (x[0] - x[1]) + x[2];
  }
};

struct ControlVariate : UpdatedBy<ControlVariateUpdate> {
  static constexpr OpSpec kSpec = {.op = "control_variate_",
                                   .lists = {{"grads", Role::kInPlace},
                                             {"anchor_grads", Role::kGradient},
                                             {"full_grads", Role::kStatistic}}};
};

// Running estimate of a stochastic gradient's variance:
//
//   V <- V + w ((grad - previous)^2 / 2 - V),   previous <- grad
//
// The mean is Var(grad) plus half the squared drift of the mean gradient in one
// step. A running variance would include the whole drift along the chain: twice
// the estimate on N(0, 1).
template <class Real>
class GradientVarianceUpdate {
 public:
  static constexpr std::array<Role, 3> kRoles = {Role::kGradient, Role::kState,
                                                 Role::kState};

  explicit GradientVarianceUpdate(const auto& number)
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

// Correctly rounded square roots in place: torch's differ between processors.
template <class Real>
class RootUpdate {
 public:
  static constexpr std::array<Role, 1> kRoles = {Role::kInPlace};

  explicit RootUpdate(const auto& /*none*/) {}

  SG_INLINE void operator()(Real (&x)[1], Real /*xi*/) const {
    x[0] = SquareRoot(x[0]);
  }
};

struct SquareRoots : UpdatedBy<RootUpdate> {
  static constexpr OpSpec kSpec = {.op = "square_root_",
                                   .lists = {{"tensors", Role::kInPlace}}};
};

// The sum of the squares of all elements.
// A map, see Note [Maps] in launch/reduce.h.
struct Square {
  static constexpr std::array<Role, 1> kRoles = {Role::kGradient};
  static constexpr std::array<bool, 1> kReads = {true};
  SG_INLINE double operator()(const double (&x)[1]) const {
    return x[0] * x[0];
  }
};

struct SumOfSquares {
  static constexpr OpSpec kSpec = {.op = "sum_of_squares",
                                   .lists = {{"tensors", Role::kGradient}},
                                   .sums = kOneNumber};

  static void Reduce(const auto& /*call*/, const auto& sum) { sum(Square()); }
};

}  // namespace torch_sgmcmc
