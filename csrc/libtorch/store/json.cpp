#include "libtorch/store/json.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <system_error>

namespace torch_sgmcmc {
namespace {

[[noreturn]] void Fail(const char* reason) { throw std::runtime_error(reason); }

template <typename T, typename Value>
const T& As(const Value& value, const char* wanted) {
  if (const T* found = std::get_if<T>(&value)) return *found;
  throw std::runtime_error(std::string("there is no ") + wanted);
}

// A code point in UTF-8.
void AppendUtf8(std::string& text, uint32_t code) {
  const auto byte = [&](uint32_t bits) { text += static_cast<char>(bits); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xC0 | (code >> 6));
    byte(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    byte(0xE0 | (code >> 12));
    byte(0x80 | ((code >> 6) & 0x3F));
    byte(0x80 | (code & 0x3F));
  } else {
    byte(0xF0 | (code >> 18));
    byte(0x80 | ((code >> 12) & 0x3F));
    byte(0x80 | ((code >> 6) & 0x3F));
    byte(0x80 | (code & 0x3F));
  }
}

}  // namespace

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  Json Whole() {
    Json value = Value(0);
    SkipSpace();
    if (at_ != text_.size()) Fail("there is more than one value");
    return value;
  }

 private:
  // Deeper nests would exhaust the stack; a store's have four levels.
  static constexpr int kMaxDepth = 32;

  void SkipSpace() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) !=
                                     std::string_view::npos) {
      ++at_;
    }
  }

  char Next() {
    if (at_ == text_.size()) Fail("it ends too early");
    return text_[at_++];
  }

  bool Takes(char expected) {
    SkipSpace();
    if (at_ == text_.size() || text_[at_] != expected) return false;
    ++at_;
    return true;
  }

  bool TakesWord(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  // kMaxDepth bounds it. NOLINTNEXTLINE(misc-no-recursion)
  Json Value(int depth) {
    if (depth > kMaxDepth) Fail("it is nested too deeply");
    Json value;
    if (Takes('{')) {
      Json::Object entries;
      if (!Takes('}')) {
        do {
          if (!Takes('"')) Fail("there is no key");
          std::string key = String();
          if (!Takes(':')) Fail("there is no colon");
          entries.emplace_back(std::move(key), Value(depth + 1));
        } while (Takes(','));
        if (!Takes('}')) Fail("an object has no end");
      }
      value.value_ = std::move(entries);
    } else if (Takes('[')) {
      Json::Array items;
      if (!Takes(']')) {
        do {
          items.push_back(Value(depth + 1));
        } while (Takes(','));
        if (!Takes(']')) Fail("an array has no end");
      }
      value.value_ = std::move(items);
    } else if (Takes('"')) {
      value.value_ = String();
    } else if (TakesWord("true")) {
      value.value_ = true;
    } else if (TakesWord("false")) {
      value.value_ = false;
    } else if (!TakesWord("null")) {
      Number(value);
    }
    return value;
  }

  void Number(Json& value) {
    const char* const begin = text_.data() + at_;
    const char* const end = text_.data() + text_.size();
    int64_t integer = 0;
    const auto whole = std::from_chars(begin, end, integer);
    double number = 0;
    const auto real = std::from_chars(begin, end, number);
    if (real.ec != std::errc() || !std::isfinite(number)) {
      Fail("there is no value");
    }
    if (whole.ec == std::errc() && whole.ptr == real.ptr) {
      value.value_ = integer;
    } else {
      value.value_ = number;
    }
    at_ += static_cast<size_t>(real.ptr - begin);
  }

  uint32_t Hex() {
    uint32_t code = 0;
    if (at_ + 4 > text_.size()) Fail("a string has no end");
    const char* const begin = text_.data() + at_;
    if (std::from_chars(begin, begin + 4, code, 16).ptr != begin + 4) {
      Fail("a string has a wrong escape");
    }
    at_ += 4;
    return code;
  }

  std::string String() {
    constexpr std::string_view kEscapes = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    std::string text;
    for (char c = Next(); c != '"'; c = Next()) {
      if (c != '\\') {
        text += c;
        continue;
      }
      c = Next();
      if (c == 'u') {
        uint32_t code = Hex();
        if (code >= 0xD800 && code < 0xDC00 && TakesWord("\\u")) {
          code = 0x10000 + ((code - 0xD800) << 10) + (Hex() - 0xDC00);
        }
        AppendUtf8(text, code);
        continue;
      }
      const size_t which = kEscapes.find(c);
      if (which == std::string_view::npos) Fail("a string has a wrong escape");
      text += kMeanings[which];
    }
    return text;
  }

  std::string_view text_;
  size_t at_ = 0;
};

Json Json::Parse(std::string_view text) { return JsonReader(text).Whole(); }

int64_t Json::Integer() const { return As<int64_t>(value_, "integer"); }

double Json::Number() const {
  if (IsNull()) return std::numeric_limits<double>::quiet_NaN();
  if (const auto* integer = std::get_if<int64_t>(&value_)) {
    return static_cast<double>(*integer);
  }
  return As<double>(value_, "number");
}

const std::string& Json::Text() const {
  return As<std::string>(value_, "string");
}
const Json::Array& Json::Items() const { return As<Array>(value_, "array"); }
const Json::Object& Json::Entries() const {
  return As<Object>(value_, "object");
}

const Json* Json::Find(std::string_view key) const {
  for (const auto& [name, value] : Entries()) {
    if (name == key) return &value;
  }
  return nullptr;
}

const Json& Json::At(std::string_view key) const {
  if (const Json* found = Find(key)) return *found;
  throw std::runtime_error("there is no " + Quoted(key));
}

std::string Quoted(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      quoted += "\\u00";
      quoted += kDigits[static_cast<unsigned char>(c) >> 4];
      quoted += kDigits[static_cast<unsigned char>(c) & 15];
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string JsonNumber(double value) {
  if (!std::isfinite(value)) return "null";
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.begin(), digits.end(), value);
  return {digits.data(), end.ptr};
}

}  // namespace torch_sgmcmc
