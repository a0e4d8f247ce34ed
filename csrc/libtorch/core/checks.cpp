#include "libtorch/core/checks.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace torch_sgmcmc {
namespace {

// printf's %g.
std::string General(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

}  // namespace

std::string Repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  // The shortest digits that read back as this number; Python then writes an
  // exponent below 1e-4 and from 1e16 on.
  std::array<char, 400> text{};
  const auto write = [&](std::chars_format format) {
    const auto end =
        std::to_chars(text.data(), text.data() + text.size(), value, format);
    return std::string(text.data(), end.ptr);
  };
  const double size = std::abs(value);
  if (size != 0 && (size < 1e-4 || size >= 1e16)) {
    return write(std::chars_format::scientific);
  }
  std::string fixed = write(std::chars_format::fixed);
  if (fixed.find('.') == std::string::npos) fixed += ".0";
  return fixed;
}

std::string Repr(const std::string& value) {
  std::string text = "'";
  text += value;
  return text += "'";
}

void CheckReal(const char* name, double value, const Range& range) {
  const bool above = range.low_open ? value > range.low : value >= range.low;
  if (above && value < range.high) return;
  std::string message = std::string("Invalid ") + name + ": " + Repr(value);
  if (std::isinf(range.high)) {
    message += std::string(" (must be finite and ") +
               (range.low_open ? "> " : ">= ") + General(range.low) + ")";
  } else {
    message += std::string(" (must be in ") + (range.low_open ? "(" : "[") +
               General(range.low) + ", " + General(range.high) + "))";
  }
  Invalid(message);
}

void CheckInteger(const char* name, int64_t value, int64_t low) {
  if (value >= low) return;
  Invalid(std::string("Invalid ") + name + ": " + std::to_string(value) +
          " (must be >= " + std::to_string(low) + ")");
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
