#include "bnn/json.h"

#include <charconv>
#include <cmath>
#include <iomanip>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace bnn {
namespace {

std::string Text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  char digits[32];
  const auto end = std::to_chars(digits, std::end(digits), value).ptr;
  const std::string text(digits, end);
  // A reader shall see that it is not an integer.
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

void Write(std::ostream& out, const c10::IValue& value) {
  const char* separator = "";
  if (value.isGenericDict()) {
    out << '{';
    for (const auto& entry : value.toGenericDict()) {
      out << std::exchange(separator, ", ");
      Write(out, entry.key());
      out << ": ";
      Write(out, entry.value());
    }
    out << '}';
  } else if (value.isList()) {
    out << '[';
    for (const c10::IValue& element : value.toListRef()) {
      out << std::exchange(separator, ", ");
      Write(out, element);
    }
    out << ']';
  } else if (value.isString()) {
    out << std::quoted(value.toStringRef());
  } else if (value.isDouble()) {
    out << Text(value.toDouble());
  } else if (value.isBool()) {
    out << (value.toBool() ? "true" : "false");
  } else if (value.isInt()) {
    out << value.toInt();
  } else {
    throw std::invalid_argument("JSON has no " + value.tagKind());
  }
}

}  // namespace

std::string ToJson(const c10::IValue& value) {
  std::ostringstream out;
  Write(out, value);
  return std::move(out).str();
}

}  // namespace bnn
