#include "libtorch/core/checks.h"

#include <cmath>
#include <stdexcept>
#include <string>

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

void Invalid(const std::string& message) {
  throw std::invalid_argument(message);
}

}  // namespace torch_sgmcmc
