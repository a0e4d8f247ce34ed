#include "libtorch/core/checks.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "libtorch/core/text.h"

namespace torch_sgmcmc {

std::string Shown(double value) {
  std::string text = Shortest(value);
  // So that it is seen to be no integer.
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string Shown(const std::string& value) { return "'" + value + "'"; }

void CheckReal(const char* name, double value, const Range& range) {
  if (range.Has(value)) return;
  Invalid(std::string("Invalid ") + name + ": " + Shown(value) + " (must be " +
          range.Wanted() + ")");
}

void CheckInteger(const char* name, int64_t value, int64_t low, double high) {
  if (value >= low && static_cast<double>(value) < high) return;
  const std::string least = std::to_string(low);
  Invalid(std::string("Invalid ") + name + ": " + std::to_string(value) +
          " (must be " +
          (std::isinf(high)
               ? ">= " + least
               : "in [" + least + ", " + Shortest(high - 1) + "]") +
          ")");
}

void CheckCount(const char* name, int64_t value) {
  CheckInteger(name, value);
  if (value < int64_t{1} << 62) return;
  Invalid(std::string("Invalid ") + name + ": " + std::to_string(value) +
          " (must be in [0, 2^62))");
}

void CheckFriction(double noise_estimate,
                   double friction,
                   const char* what,
                   const std::string& where) {
  // momentum 0.9 and noise_estimate 0.1 are equal parts of 1, but for rounding.
  if (noise_estimate > friction + 1e-12) {
    Invalid("Invalid noise_estimate: " + SixDigits(noise_estimate) + where +
            " (must not exceed the friction " + what + " = " +
            SixDigits(friction) +
            ": lower momentum or lr, or take larger minibatches)");
  }
}

void Invalid(const std::string& message) {
  throw std::invalid_argument(message);
}

}  // namespace torch_sgmcmc
