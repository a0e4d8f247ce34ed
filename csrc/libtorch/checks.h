// Checks of hyperparameters and other arguments, and values in messages.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/op_spec.h"

namespace torch_sgmcmc {

// A number with as many digits as it takes to read it back, and a string in
// quotes.
std::string Shown(double value);
std::string Shown(const std::string& value);

// "a, b, c": names with commas, or `last` before the last.
std::string Enumerated(const std::vector<std::string>& names,
                       const char* last = ", ");

// Throws std::invalid_argument unless value is one of the words.
void CheckWord(const char* name, const std::string& value,
               const std::vector<std::string>& words, bool or_number = false);

// Throws std::invalid_argument unless value is in its range. NaN stands for a
// value that was not set.
void CheckReal(const char* name, double value, const Range& range = {});

// Throws std::invalid_argument unless value is in [low, high).
void CheckInteger(const char* name, int64_t value, int64_t low = 0,
                  double high = std::numeric_limits<double>::infinity());

// Throws std::invalid_argument unless value is in [0, 2^62): a count that a
// state dict may hold, to which steps can add without an overflow.
void CheckCount(const char* name, int64_t value);

// Throws std::invalid_argument unless one count is a part of another one.
void CheckPart(const char* name, int64_t count, const char* whole,
               int64_t most);

// Throws std::invalid_argument if there is less friction, which is `what`.
void CheckFriction(double noise_estimate, double friction, const char* what,
                   const std::string& where = "");

// Throws what Python raises as ValueError, with these parts of a message.
template <typename... Part>
[[noreturn]] void Invalid(const Part&... parts) {
  throw std::invalid_argument(c10::str(parts...));
}
// Throws what Python raises as RuntimeError.
template <typename... Part>
[[noreturn]] void Raise(const Part&... parts) {
  throw std::runtime_error(c10::str(parts...));
}

// Throws, beginning with `what`, unless a value is a tensor with numbers, of
// this shape.
void CheckTensor(const std::string& what, const c10::IValue& value,
                 c10::IntArrayRef shape, bool is_floating_point = false);

// ---- Values in messages, in the words of LibTorch ---------------------------

// "[2, 3]"
std::string Shape(c10::IntArrayRef sizes);

// "torch::kFloat"
std::string DtypeName(c10::ScalarType dtype);

// "torch::kSparse"
std::string LayoutName(c10::Layout layout);

// "Double", or "none"
std::string KindOf(const c10::IValue& value);

// A key of a dict.
std::string KeyText(const c10::IValue& key);

// With so many digits at most.
std::string Rounded(double value, int digits = 6);

}  // namespace torch_sgmcmc
