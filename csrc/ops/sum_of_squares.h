// The sum of the squares of all elements, shared by CPU and CUDA.
#pragma once

#include <array>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// A map, see Note [Maps] in launch/reduce.h.
struct Square {
  static constexpr std::array<Role, 1> kRoles = {Role::kGradient};
  static constexpr std::array<bool, 1> kReads = {true};
  SG_INLINE double operator()(const double (&x)[1]) const {
    return x[0] * x[0];
  }
  SG_INLINE static double Finish(double sum) { return sum; }
};

struct SumOfSquares {
  static constexpr OpSpec kSpec = {.op = "sum_of_squares",
                                   .lists = {{"tensors", Role::kGradient}},
                                   .sums = kOneNumber};

  template <class Reducer, class Plan, class Call, class Tensor>
  static void Reduce(const Plan& plan, const Call& /*call*/, Tensor& result) {
    Reducer::Reduce(plan, Square(), /*num_chains=*/1, result);
  }
};

}  // namespace torch_sgmcmc
