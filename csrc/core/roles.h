// What an update does with each of its tensor lists, and in which type.
//
// An update functor (samplers/*.h) lists the roles of its arguments; the
// drivers (apply/*) load, convert and store accordingly. Parameters and
// gradients come in fp64, fp32, bf16 or fp16. Arithmetic and sampler state are
// fp64 for fp64 parameters and fp32 for all others.
#pragma once

#include <type_traits>

#include "core/macros.h"

namespace torch_sgmcmc {

enum class Role {
  kParameter,  // read and written, in the parameter's type
  kOutput,     // written only, in the parameter's type
  kGradient,   // read only, in the parameter's type
  kState,      // read and written, in the arithmetic type
  kStatistic   // read only, in the arithmetic type
};

constexpr bool IsWritten(Role role) {
  return role == Role::kParameter || role == Role::kOutput ||
         role == Role::kState;
}
constexpr bool IsRead(Role role) { return role != Role::kOutput; }
constexpr bool IsInArithmeticType(Role role) {
  return role == Role::kState || role == Role::kStatistic;
}

// The type of arithmetic and of sampler state for parameters of type T.
template <class T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The element type of an argument with the given role.
template <Role role, class T>
using Stored = std::conditional_t<IsInArithmeticType(role), Arithmetic<T>, T>;

}  // namespace torch_sgmcmc
