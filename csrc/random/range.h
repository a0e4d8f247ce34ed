// Where a number may be, and how samplers and operators say so.
#pragma once

#include <array>
#include <charconv>
#include <limits>
#include <string>

namespace torch_sgmcmc {

// With as many digits as it takes to read it back.
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

}  // namespace torch_sgmcmc
