#include "bnn/json.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace bnn {
namespace {

class Writer {
 public:
  explicit Writer(bool one_line) : one_line_(one_line) {}

  void write(const c10::IValue& value) {
    if (value.isGenericDict()) {
      const auto dict = value.toGenericDict();
      write_all('{', '}', dict, [&](const auto& entry) {
        write(entry.key().toStringRef());
        text_ += ": ";
        write(entry.value());
      });
    } else if (value.isList()) {
      write_all('[', ']', value.toListRef(), [&](const c10::IValue& element) {
        write(element);
      });
    } else if (value.isString()) {
      write(value.toStringRef());
    } else if (value.isDouble()) {
      write(value.toDouble());
    } else if (value.isInt()) {
      text_ += std::to_string(value.toInt());
    } else if (value.isBool()) {
      text_ += value.toBool() ? "true" : "false";
    } else if (value.isNone()) {
      text_ += "null";
    } else {
      throw std::invalid_argument("JSON has no " + value.tagKind());
    }
  }

  const std::string& text() const { return text_; }

 private:
  template <typename Elements, typename Write>
  void write_all(char open,
                 char close,
                 const Elements& elements,
                 Write write_one) {
    text_ += open;
    ++depth_;
    bool first = true;
    for (const auto& element : elements) {
      if (!first) text_ += one_line_ ? ", " : ",";
      first = false;
      new_line();
      write_one(element);
    }
    --depth_;
    if (!first) new_line();
    text_ += close;
  }

  void new_line() {
    if (!one_line_) text_ += '\n' + std::string(depth_, ' ');
  }

  void write(const std::string& value) {
    text_ += '"';
    for (const char c : value) {
      if (c == '"' || c == '\\') {
        text_ += {'\\', c};
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
        text_ += escaped;
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  void write(double value) {
    if (!std::isfinite(value)) {
      text_ += std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
      return;
    }
    char digits[32];
    const auto result = std::to_chars(digits, digits + sizeof digits, value);
    const std::string number(digits, result.ptr);
    text_ += number;
    // A reader shall see that it is not an integer.
    if (number.find_first_of(".e") == std::string::npos) text_ += ".0";
  }

  std::string text_;
  size_t depth_ = 0;
  bool one_line_;
};

}  // namespace

std::string ToJson(const c10::IValue& value, bool one_line) {
  Writer writer(one_line);
  writer.write(value);
  return writer.text();
}

}  // namespace bnn
