// The hyperparameters of all samplers: kinds, ranges and defaults.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "ops/op_spec.h"

namespace torch_sgmcmc {

enum class SettingKind { kReal, kWhole, kFlag, kWord };

// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding)
struct Setting {
  constexpr Range range() const { return {low, high, low_open}; }

  const char* name = nullptr;
  SettingKind kind = SettingKind::kReal;
  // The default (flags: 0 or 1); NaN if there is none.
  double fallback = std::numeric_limits<double>::quiet_NaN();
  // In [low, high), or (low, high).
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;
  // True if the value may be none, the default.
  bool optional = false;
  // The words, the default first; also accepted in place of a number.
  std::array<const char*, 4> words = {};
  // For the message if it must be set.
  const char* purpose = nullptr;
};

// A setting that is also an operator's argument.
constexpr Setting Of(const ScalarArg& number, Setting rest = {}) {
  rest.name = number.name;
  rest.kind = IsInteger(number.domain) ? SettingKind::kWhole : rest.kind;
  const Range range = RangeOf(number.domain);
  rest.low = range.low;
  rest.high = range.high;
  rest.low_open = range.low_open;
  if (rest.fallback != rest.fallback) rest.fallback = number.fallback;
  return rest;
}

// True for the samplers of the table, of which C++ has some.
bool IsSampler(std::string_view name);

// The settings of a sampler. Throws std::out_of_range for unknown names.
std::span<const Setting> SettingsOf(std::string_view sampler);

// True if any sampler has a setting of this name.
bool IsSetting(std::string_view name);

// part / whole; NaN without a whole.
inline double Ratio(double part, double whole) {
  return whole > 0 ? part / whole : std::numeric_limits<double>::quiet_NaN();
}

// The weight of a gradient in SGHMC's noise_estimate="online": a mean over the
// first 1 / kVarianceDecay gradients, then an exponential mean.
constexpr double kVarianceDecay = 1e-3;

// Fewest gradients before the estimate is used.
constexpr int64_t kMinGradients = 100;

}  // namespace torch_sgmcmc
