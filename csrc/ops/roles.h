// What an update does with each of its tensor lists, and in which type.
//
// An update functor (ops/*.h) lists the roles of its arguments; the
// drivers (launch/*) load, convert and store accordingly. Parameters and
// gradients come in fp64, fp32, bf16 or fp16. Arithmetic and sampler state are
// fp64 for fp64 parameters and fp32 for all others.
//
// Note [Master parameters]
// An update's move is mostly smaller than a unit in the last place of bf16 or
// fp16. Rounded to nearest after every update, the chain forgets small moves:
// on N(1, 0.03^2) at lr h = 0.001 a bf16 chain has 0.3 (SGHMC) of the variance.
// Stochastic rounding keeps their mean, but a move of deviation s is rounded
// with a variance of about 0.8 s ulp, which exceeds s^2 where s <
// ulp. So the chain runs on a master in fp32, a state of the sampler like a
// momentum, and the parameter is the master rounded to nearest: what a model
// computes with, what the gradient is taken at. A parameter that is not its
// rounded master has been changed since the last update (clamped, loaded,
// averaged) or has a master that was made for another: there the master starts
// from it.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "random/macros.h"

namespace torch_sgmcmc {

enum class Role {
  kParameter,  // read and written, in the parameter's type, with its master
  kPosition,   // read only, in the parameter's type, from its master
  kMaster,     // of kParameter or kPosition in bf16 or fp16
  kInPlace,    // read and written, in the parameter's type
  kOutput,     // written only, in the parameter's type
  kGradient,   // read only, in the parameter's type
  kState,      // read and written, in the arithmetic type
  kStatistic,  // read only, in the arithmetic type
  kPriorMean   // as kStatistic; may be absent, and is then one number
};

constexpr bool IsWritten(Role role) {
  return role == Role::kParameter || role == Role::kMaster ||
         role == Role::kInPlace || role == Role::kOutput ||
         role == Role::kState;
}
constexpr bool IsRead(Role role) { return role != Role::kOutput; }
constexpr bool IsInArithmeticType(Role role) {
  return role == Role::kMaster || role == Role::kState ||
         role == Role::kStatistic || role == Role::kPriorMean;
}

// The type of arithmetic and of sampler state for parameters of type T.
template <class T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The element type of an argument with the given role.
template <Role role, class T>
using Stored = std::conditional_t<IsInArithmeticType(role), Arithmetic<T>, T>;

// True if such an argument comes with a master, see Note [Master parameters].
template <Role role, class T>
constexpr bool kHasMaster = (role == Role::kParameter ||
                             role == Role::kPosition) &&
                            !std::is_same_v<T, Arithmetic<T>>;

// An operator's lists of tensors at most. Among a parameter's arrays its master
// comes last, and the mean of its prior before.
constexpr int kMaxArguments = 8;
constexpr int kMasters = kMaxArguments - 1;
constexpr int kPriorMeans = kMaxArguments - 2;

// Where the array of an update's index-th argument is.
constexpr size_t SlotOf(Role role, size_t index) {
  return role == Role::kPriorMean ? kPriorMeans : index;
}

// The arguments of an update (or a map), and their indices.
template <class Update>
constexpr size_t kArguments = std::tuple_size_v<decltype(Update::kRoles)>;
template <class Update>
constexpr auto kIndices = std::make_index_sequence<kArguments<Update>>();

// True if an update (or a map) subtracts the prior's mean. Where there is no
// array of it, it is update.prior_mean().
template <class Update>
constexpr bool kHasPriorMean = [] {
  // NOLINTNEXTLINE(readability-use-anyofallof): nvcc compiles this too.
  for (const Role role : Update::kRoles) {
    if (role == Role::kPriorMean) return true;
  }
  return false;
}();

// What an update draws for an element: a standard normal, or, where it says
// kUniformNoise, a number uniform on (-1, 1).
template <class Update>
constexpr bool kTakesUniforms = requires {
  Update::kUniformNoise;
};

// What an update takes for a parameter.
template <class T>
SG_INLINE float ValueOf(T parameter, float master) {
  return static_cast<T>(master).x == parameter.x
             ? master
             : static_cast<float>(parameter);
}

}  // namespace torch_sgmcmc
