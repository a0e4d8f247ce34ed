// JSON text of plain values: dicts with string keys, lists, numbers, strings.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace bnn {

/// The text on one line, as Python's json.dumps() has it: reading a number
/// gives the same bits, and what is not finite is NaN or Infinity. Strings are
/// taken to have no control characters. Throws std::invalid_argument for a
/// value that JSON does not know.
std::string ToJson(const c10::IValue& value);

}  // namespace bnn
