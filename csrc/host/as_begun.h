// That a warm-up goes on as it was begun.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "core/range.h"

namespace torch_sgmcmc {

// Throws std::invalid_argument unless an argument is what the warm-up in
// progress has; `way_out` says how to give that up.
inline void CheckAsBegun(const std::string& name,
                         std::optional<double> now,
                         std::optional<double> begun,
                         const std::string& way_out = "") {
  if (now == begun) return;
  throw std::invalid_argument(
      "Invalid " + name + ": " + (now ? Shortest(*now) : "none") +
      " (the warm-up in progress has " + (begun ? Shortest(*begun) : "none") +
      way_out + ")");
}

}  // namespace torch_sgmcmc
