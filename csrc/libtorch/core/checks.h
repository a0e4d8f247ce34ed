// Checks of hyperparameters and other arguments.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "core/range.h"

namespace torch_sgmcmc {

// A number with as many digits as it takes to read it back, and a string in
// quotes.
std::string Shown(double value);
std::string Shown(const std::string& value);

// Throws std::invalid_argument unless value is in its range. NaN stands for a
// value that was not set.
void CheckReal(const char* name, double value, const Range& range = {});

// Throws std::invalid_argument unless value is in [low, high).
void CheckInteger(const char* name,
                  int64_t value,
                  int64_t low = 0,
                  double high = std::numeric_limits<double>::infinity());

// Throws std::invalid_argument unless value is in [0, 2^62): a count that a
// state dict may hold, to which steps can add without an overflow.
void CheckCount(const char* name, int64_t value);

// Throws std::invalid_argument if there is less friction, which is `what`.
void CheckFriction(double noise_estimate,
                   double friction,
                   const char* what,
                   const std::string& where = "");

// Throws what Python raises as ValueError.
[[noreturn]] void Invalid(const std::string& message);

}  // namespace torch_sgmcmc
