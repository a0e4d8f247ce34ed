// An operator on lists of tensors, as data: its spec.
//
// Specs stand beside functors (ops/*.h) and are listed in ops/registry.h. From
// its spec an operator gets schema and checks of numbers (launch/call.h), boxed
// kernels (launch/boxed.h), C++ calls (libtorch/operators.h, method.cpp) and
// its fake kernel for torch.compile. The struct with the spec has the rest as
// code.
#pragma once

#include <array>
#include <charconv>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ops/roles.h"

namespace torch_sgmcmc {

// With the fewest digits that identify the number.
inline std::string Shortest(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value);
  return {text.data(), end.ptr};
}

// [low, high), or (low, high).
struct Range {
  constexpr bool Has(double value) const {
    return (low_open ? value > low : value >= low) && value < high;
  }
  // "finite and >= 0", or "in [0, 1)".
  std::string Wanted() const {
    constexpr double kEndless = std::numeric_limits<double>::infinity();
    if (high < kEndless) {
      return std::string("in ") + (low_open ? "(" : "[") + Shortest(low) +
             ", " + Shortest(high) + ")";
    }
    if (low == -kEndless) return "finite";
    return std::string("finite and ") + (low_open ? "> " : ">= ") +
           Shortest(low);
  }

  double low = 0;
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;
};

// A number's domain. The last three are integers; code checks kCode.
enum class Domain {
  kFinite,
  kNotNegative,
  kPositive,
  kBelowOne,
  kCount,
  kPositiveCount,
  kCode
};

constexpr bool IsInteger(Domain domain) { return domain >= Domain::kCount; }

constexpr Range RangeOf(Domain domain) {
  constexpr double kEndless = std::numeric_limits<double>::infinity();
  switch (domain) {
    case Domain::kPositive:
      return {.low_open = true};
    case Domain::kBelowOne:
      return {.high = 1};
    case Domain::kPositiveCount:
      return {.low = 1};
    case Domain::kFinite:
    case Domain::kCode:
      return {.low = -kEndless, .low_open = true};
    case Domain::kNotNegative:
    case Domain::kCount:
      break;
  }
  return {};
}

struct ScalarArg {
  const char* name = nullptr;
  Domain domain = Domain::kFinite;
  // The default; NaN if there is none.
  double fallback = std::numeric_limits<double>::quiet_NaN();
};

// The start of a parameter's state: by code, zeros, or the momentum's
// stationary law N(0, lr T / N).
enum class Start { kCustom, kZeros, kStationary };

struct TensorListArg {
  const char* name = nullptr;
  Role role = Role::kGradient;
  // Optional lists are all given or all empty.
  bool is_optional = false;
  // Its key in a parameter's state, or null.
  const char* key = nullptr;
  Start start = Start::kCustom;
};

enum class Noise {
  kNone,
  kUpdate,   // Purpose::kUpdate, with device_step
  kMomenta,  // Purpose::kMomentum, without device_step
  kGiven     // any purpose, with device_step
};

template <class T, size_t kMost>
struct InlineVector {
  constexpr InlineVector() = default;  // nvcc takes {} for a list of one
  // NOLINTNEXTLINE(google-explicit-constructor): written as a list.
  constexpr InlineVector(std::initializer_list<T> list) {
    for (const T& item : list) items[count++] = item;
  }
  constexpr const T& operator[](size_t i) const { return items[i]; }
  constexpr const T* begin() const { return items.data(); }
  constexpr const T* end() const { return items.data() + count; }

  std::array<T, kMost> items = {};
  size_t count = 0;
};

struct OpSpec {
  const char* op = nullptr;
  InlineVector<TensorListArg, kMaxArguments> lists;
  InlineVector<ScalarArg, kMaxArguments> numbers = {};
  Noise noise = Noise::kNone;
  // Whether it takes prior_mean, a number, or prior_means, tensors.
  bool has_prior_mean = false;
  // The number of sums, returned in float64, or kOneNumber, kForEachChain (with
  // num_chains as the last number), kCustom.
  int sums = 0;
};

inline constexpr int kOneNumber = -1;
inline constexpr int kForEachChain = -2;
inline constexpr int kCustom = -3;

// The places of tensors in sums of each: a plan leaves out empty ones, whose
// sums stay 0.
inline std::vector<int64_t> RowsOfTensors(const auto& tensors) {
  std::vector<int64_t> rows;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() > 0) rows.push_back(static_cast<int64_t>(i));
  }
  return rows;
}

// An operator that is one update, made of a NamedCall (launch/call.h).
template <template <class> class Functor>
struct UpdatedBy {
  template <class Real>
  using Update = Functor<Real>;
};

// Common arguments of samplers.
namespace args {

inline constexpr TensorListArg kParams{"params", Role::kParameter};
inline constexpr TensorListArg kGrads{"grads", Role::kGradient};
inline constexpr TensorListArg kMomenta{.name = "momenta",
                                        .role = Role::kState,
                                        .key = "momentum",
                                        .start = Start::kStationary};
// G of the coordinates theta / sqrt(G), finite and > 0.
inline constexpr TensorListArg kPreconditioners{.name = "preconditioners",
                                                .role = Role::kStatistic,
                                                .key = "preconditioner"};
inline constexpr TensorListArg kMasterList{
    .name = "masters", .role = Role::kMaster, .key = "master"};
inline constexpr ScalarArg kLr{"lr", Domain::kNotNegative};
inline constexpr ScalarArg kMomentum{"momentum", Domain::kBelowOne};
inline constexpr ScalarArg kNumData{"num_data", Domain::kPositive};
inline constexpr ScalarArg kPriorPrecision{"prior_precision",
                                           Domain::kNotNegative};
inline constexpr ScalarArg kPriorMean{"prior_mean", Domain::kFinite, 0};
inline constexpr ScalarArg kTemperature{"temperature", Domain::kNotNegative};
inline constexpr ScalarArg kPositiveTemperature{"temperature",
                                                Domain::kPositive};
inline constexpr ScalarArg kDecay{"decay", Domain::kBelowOne};
inline constexpr ScalarArg kEps{"eps", Domain::kPositive};
inline constexpr ScalarArg kNoiseEstimate{"noise_estimate",
                                          Domain::kNotNegative, 0};
inline constexpr ScalarArg kResampleEvery{"resample_momentum_every",
                                          Domain::kCount, 0};
inline constexpr ScalarArg kThermostatRate{"thermostat_rate",
                                           Domain::kNotNegative};
// Factors of momenta and thermostats for changed settings (host/rescaling.h).
inline constexpr ScalarArg kMomentumScale{"momentum_scale",
                                          Domain::kNotNegative, 1};
inline constexpr ScalarArg kThermostatScale{"thermostat_scale",
                                            Domain::kNotNegative, 1};
inline constexpr ScalarArg kNumChains{"num_chains", Domain::kPositiveCount};

}  // namespace args

// Common numbers, which are not in specs. A new one needs a member, a line in
// the table, a condition in Has(), and its use in updates.
struct CommonNumbers {
  double prior_mean = args::kPriorMean.fallback;  // without tensors
};

struct CommonNumber {
  ScalarArg scalar;
  double CommonNumbers::*place = nullptr;
};

inline constexpr CommonNumber kCommonNumbers[] = {
    {args::kPriorMean, &CommonNumbers::prior_mean}};

constexpr bool Has(const OpSpec& spec, const CommonNumber& /*number*/) {
  return spec.has_prior_mean;
}

// The place of a name, at compile time: unknown names do not compile.
consteval size_t PlaceOfName(const auto& items, std::string_view name) {
  for (size_t i = 0; i < items.count; ++i) {
    if (items[i].name == name) return i;
  }
  throw "the spec has no item of this name";
}

// An operator's arguments in their order.
enum class Kind {
  kList,
  kNumber,
  kInteger,
  kOffsets,
  kSeed,
  kStep,
  kPurpose,
  kDeviceStep,
  kCommon,
  kPriorMeans,
  kShardRows,
  kNumChains
};

struct Slot {
  Kind kind = Kind::kList;
  size_t index = 0;  // among lists or numbers
};

constexpr int kMaxSlots =
    2 * kMaxArguments + 9 + static_cast<int>(std::size(kCommonNumbers));

struct ArgLayout {
  constexpr void Add(Kind kind, size_t index = 0) {
    items[count++] = {kind, index};
  }

  std::array<Slot, kMaxSlots> items = {};
  size_t count = 0;
};

constexpr ArgLayout ArgLayoutOf(const OpSpec& spec) {
  ArgLayout slots;
  for (size_t i = 0; i < spec.lists.count; ++i) slots.Add(Kind::kList, i);
  for (size_t i = 0; i < spec.numbers.count; ++i) {
    const bool is_integer = IsInteger(spec.numbers[i].domain);
    slots.Add(is_integer ? Kind::kInteger : Kind::kNumber, i);
  }
  const bool has_noise = spec.noise != Noise::kNone;
  const bool has_device = has_noise && spec.noise != Noise::kMomenta;
  if (has_noise) {
    slots.Add(Kind::kOffsets);
    slots.Add(Kind::kSeed);
    slots.Add(Kind::kStep);
  }
  if (spec.noise == Noise::kGiven) slots.Add(Kind::kPurpose);
  if (has_device) slots.Add(Kind::kDeviceStep);
  for (size_t i = 0; i < std::size(kCommonNumbers); ++i) {
    if (Has(spec, kCommonNumbers[i])) slots.Add(Kind::kCommon, i);
  }
  if (spec.has_prior_mean) slots.Add(Kind::kPriorMeans);
  if (has_noise) slots.Add(Kind::kShardRows);
  if (has_device) slots.Add(Kind::kNumChains);
  return slots;
}

// A list of operators with specs, as a type.
template <class... Ops>
struct Operators {
  static constexpr size_t kCount = sizeof...(Ops);
  static constexpr std::array<const OpSpec*, kCount> kOpSpecs = {
      &Ops::kSpec...};

  // Calls `visit` with std::type_identity of each.
  template <class Visit>
  static void ForEach(Visit visit) {
    (visit(std::type_identity<Ops>()), ...);
  }
};

// The specs of all operators, in the order of packed calls. In a source of its
// own: what includes ops/registry.h is compiled again after a change of any
// operator.
std::span<const OpSpec* const> OpSpecs();

}  // namespace torch_sgmcmc
