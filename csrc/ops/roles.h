// Roles and dtypes of an update's tensor lists. Drivers (launch/*) load,
// convert and store by role. Parameters and gradients are fp64, fp32, bf16 or
// fp16; arithmetic and state are fp64 for fp64 parameters, else fp32.
//
// Note [Master parameters]
// An update's move is mostly smaller than a unit in the last place of bf16 or
// fp16. Rounded to nearest after every update, the chain forgets small moves:
// on N(1, 0.03^2) at lr h = 0.001 a bf16 chain has 0.3 (SGHMC) of the variance.
// Stochastic rounding keeps their mean, but adds a variance of about 0.8 s ulp
// to a move of deviation s, more than s^2 for s < ulp. So the chain runs on a
// master in fp32, part of the state, and the parameter is the master rounded to
// nearest. A parameter that differs from its rounded master has been changed
// since the last update (clamped, loaded, averaged): the master restarts from
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "random/macros.h"

namespace torch_sgmcmc {

enum class Role {
  kParameter,     // read and written, in the parameter's type, with its master
  kPosition,      // read only, in the parameter's type, from its master
  kMaster,        // of kParameter or kPosition in bf16 or fp16
  kInPlace,       // read and written, in the parameter's type
  kOutput,        // written only, in the parameter's type
  kGradient,      // read only, in the parameter's type
  kState,         // read and written, in the arithmetic type
  kStatistic,     // read only, in the arithmetic type
  kChainNumbers,  // float64 [chains, kNumbersOfChain], of all parameters
  kPriorMean      // as kStatistic; may be absent, and is then one number
};

constexpr int64_t kNumbersOfChain = 4;

constexpr bool IsWritten(Role role) {
  return role == Role::kParameter || role == Role::kMaster ||
         role == Role::kInPlace || role == Role::kOutput ||
         role == Role::kState;
}
// True if a driver reads it for each element.
constexpr bool IsRead(Role role) {
  return role != Role::kOutput && role != Role::kChainNumbers;
}
constexpr bool IsInArithmeticType(Role role) {
  return role == Role::kMaster || role == Role::kState ||
         role == Role::kStatistic || role == Role::kPriorMean;
}

// The type of arithmetic and of sampler state for parameters of type T.
template <class T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <Role role, class T>
using Stored = std::conditional_t<IsInArithmeticType(role), Arithmetic<T>, T>;

// True if such an argument comes with a master, see Note [Master parameters].
template <Role role, class T>
constexpr bool kHasMaster = (role == Role::kParameter ||
                             role == Role::kPosition) &&
                            !std::is_same_v<T, Arithmetic<T>>;

// The most lists of an operator. A parameter's last arrays are the prior mean
// and the master.
constexpr int kMaxArguments = 8;
constexpr int kMasters = kMaxArguments - 1;
constexpr int kPriorMeans = kMaxArguments - 2;

// The place of the array of an update's index-th argument.
constexpr size_t SlotOf(Role role, size_t index) {
  return role == Role::kPriorMean ? kPriorMeans : index;
}

// The arguments of an update (or a map), and their indices.
template <class Update>
constexpr size_t kArguments = std::tuple_size_v<decltype(Update::kRoles)>;
template <class Update>
constexpr auto kIndices = std::make_index_sequence<kArguments<Update>>();

// True if an update (or a map) subtracts the prior mean: an array, or the
// number update.prior_mean().
template <class Update>
constexpr bool kHasPriorMean = [] {
  // NOLINTNEXTLINE(readability-use-anyofallof): nvcc compiles this too.
  for (const Role role : Update::kRoles) {
    if (role == Role::kPriorMean) return true;
  }
  return false;
}();

// True for noise uniform on (-1, 1), by kUniformNoise; else it is normal.
template <class Update>
constexpr bool kTakesUniforms = requires {
  Update::kUniformNoise;
};

// An update, or with a list of chains' numbers the update of this chain.
template <class Update>
SG_INLINE Update OfChain(const Update& update,
                         [[maybe_unused]] void* const* data,
                         [[maybe_unused]] int64_t chain) {
  Update own = update;
  if constexpr (requires { Update::kChainNumbers; }) {
    own.Take(static_cast<const double*>(data[Update::kChainNumbers]) +
             chain * kNumbersOfChain);
  }
  return own;
}

// Optional functions of an update: the steps that it leaves out, and whether it
// reads noise; and of a map, a sum's result.
SG_INLINE bool Skips([[maybe_unused]] const auto& update,
                     [[maybe_unused]] uint64_t step) {
  if constexpr (requires { update.skips(step); }) return update.skips(step);
  return false;
}
SG_INLINE bool NeedsNoise([[maybe_unused]] const auto& update) {
  if constexpr (requires { update.needs_noise(); }) return update.needs_noise();
  return false;
}
SG_INLINE double Finish([[maybe_unused]] const auto& map, double sum) {
  if constexpr (requires { map.Finish(sum); }) return map.Finish(sum);
  return sum;
}

// An update in both types of arithmetic.
template <template <class> class Update>
class BothTypes {
 public:
  explicit BothTypes(const auto& coefficients)
      : single_(coefficients), twice_(coefficients) {}

  // For parameters of type T.
  template <class T>
  const Update<Arithmetic<T>>& For() const {
    if constexpr (std::is_same_v<T, double>) {
      return twice_;
    } else {
      return single_;
    }
  }

 private:
  Update<float> single_;
  Update<double> twice_;
};

// A parameter's value: its master, if the parameter is the rounded master.
template <class T>
SG_INLINE float ValueOf(T parameter, float master) {
  return static_cast<T>(master).x == parameter.x
             ? master
             : static_cast<float>(parameter);
}

}  // namespace torch_sgmcmc
