// That a warm-up goes on as it was begun.
#pragma once

#include <optional>
#include <string>

namespace torch_sgmcmc {

// With as many digits as it takes to read it back.
std::string Shortest(double value);

// Throws std::invalid_argument unless an argument is what the warm-up in
// progress has; `way_out` says how to give that up.
void CheckAsBegun(const std::string& name,
                  std::optional<double> now,
                  std::optional<double> begun,
                  const std::string& way_out = "");

}  // namespace torch_sgmcmc
