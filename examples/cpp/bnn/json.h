// JSON text of plain values: dicts with string keys, lists, numbers, strings.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace bnn {

/// The text, laid out as Python's json.dumps(value, indent=1) does it, or on
/// one line. Numbers are written so that reading them gives the same bits; what
/// is not finite becomes NaN or Infinity, which Python reads. Throws
/// std::invalid_argument for a value that JSON does not know.
std::string ToJson(const c10::IValue& value, bool one_line = false);

}  // namespace bnn
