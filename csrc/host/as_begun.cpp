#include "host/as_begun.h"

#include <array>
#include <charconv>
#include <stdexcept>

namespace torch_sgmcmc {

std::string Shortest(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value);
  return {text.data(), end.ptr};
}

void CheckAsBegun(const std::string& name,
                  std::optional<double> now,
                  std::optional<double> begun,
                  const std::string& way_out) {
  if (now == begun) return;
  const auto text = [](std::optional<double> value) {
    return value ? Shortest(*value) : std::string("none");
  };
  throw std::invalid_argument("Invalid " + name + ": " + text(now) +
                              " (the warm-up in progress has " + text(begun) +
                              way_out + ")");
}

}  // namespace torch_sgmcmc
