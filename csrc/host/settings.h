// The hyperparameters of all samplers: of what kind they are, in which range,
// and what they are where nobody says.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "ops/op_spec.h"

namespace torch_sgmcmc {

enum class SettingKind { kReal, kWhole, kFlag, kWord };

// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding): as rows read best.
struct Setting {
  constexpr Range range() const { return {low, high, low_open}; }

  const char* name = nullptr;
  SettingKind kind = SettingKind::kReal;
  // The default, of a flag 0 or 1; NaN if there is none.
  double fallback = std::numeric_limits<double>::quiet_NaN();
  // In [low, high), or (low, high).
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;
  // True if there may be no value, which is the default then.
  bool optional = false;
  // What a word may be, the default first; of a number, what it may be besides.
  std::array<const char*, 4> words = {};
  // What the sampler needs it for, where it must be set.
  const char* purpose = nullptr;
};

// A setting that operators take as well, in the same domain.
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

// Those of the sampler with this name. Throws std::out_of_range if there is
// none.
std::span<const Setting> SettingsOf(std::string_view sampler);

// The ratio of two counts: part / whole; NaN if there is no whole.
inline double Ratio(double part, double whole) {
  return whole > 0 ? part / whole : std::numeric_limits<double>::quiet_NaN();
}

// SGHMC's noise_estimate="online": the mean over the first 1 / kVarianceDecay
// gradients, then an exponential mean. The weight of a gradient in it:
constexpr double kVarianceDecay = 1e-3;

// The estimate is not used before so many gradients.
constexpr int64_t kMinGradients = 100;

}  // namespace torch_sgmcmc
