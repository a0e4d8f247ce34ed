// Correctly rounded square roots in place, shared by CPU and CUDA: torch's
// differ between processors.
#pragma once

#include <array>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/macros.h"

namespace torch_sgmcmc {

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
