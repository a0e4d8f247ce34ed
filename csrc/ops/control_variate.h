// The gradient of a minibatch with a control variate, shared by CPU and CUDA:
//
//   g <- (g - a) + f,
//
// with the minibatch's gradients g at theta and a at an anchor theta*, and the
// full data's gradient f at the anchor (Baker et al. 2017; Dubey et al. 2016).
// The difference comes first: at the anchor g is exactly f. Tensor operations
// would pass over memory six times, not four, and round the difference to bf16.
#pragma once

#include <array>
#include <cstdint>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/macros.h"

namespace torch_sgmcmc {

template <class Real>
class ControlVariateUpdate {
 public:
  static constexpr std::array<Role, 3> kRoles = {
      Role::kInPlace, Role::kGradient, Role::kStatistic};

  template <class Call>
  explicit ControlVariateUpdate(const Call& /*none*/) {}

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

}  // namespace torch_sgmcmc
