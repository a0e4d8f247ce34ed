#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "libtorch/chain_files.h"

namespace torch_sgmcmc {
namespace {

// Deeper nests would exhaust the stack; a store's have four levels.
constexpr int kMaxDepth = 32;

[[noreturn]] void Fail() { throw std::runtime_error("it is damaged"); }

// A code point in UTF-8.
std::string Utf8(uint32_t code) {
  if (code < 0x80) return {static_cast<char>(code)};
  std::string text;
  uint32_t first = 0x40;  // what the first byte has room for, once halved
  for (; code >= first; code >>= 6) {
    text.insert(text.begin(), static_cast<char>(0x80 | (code & 0x3F)));
    first = text.size() == 1 ? 0x20 : first >> 1;
  }
  const uint32_t marks = 0xFF & ~(2 * first - 1);
  return static_cast<char>(marks | code) + text;
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  c10::IValue Whole() {
    c10::IValue value = Value(0);
    SkipSpace();
    if (!text_.empty()) Fail();
    return value;
  }

 private:
  void SkipSpace() {
    text_.remove_prefix(
        std::min(text_.find_first_not_of(" \t\r\n"), text_.size()));
  }

  bool Takes(std::string_view word) {
    if (!text_.starts_with(word)) return false;
    text_.remove_prefix(word.size());
    return true;
  }

  char Next() {
    if (text_.empty()) Fail();
    const char next = text_[0];
    text_.remove_prefix(1);
    return next;
  }

  // NOLINTBEGIN(misc-no-recursion): kMaxDepth bounds it.
  // Calls `item` for what stands between commas up to the end.
  template <class Item>
  void Items(char end, const Item& item) {
    SkipSpace();
    if (Takes({&end, 1})) return;
    do {
      SkipSpace();
      item();
      SkipSpace();
    } while (Takes(","));
    if (!Takes({&end, 1})) Fail();
  }

  c10::IValue Value(int depth) {
    if (depth > kMaxDepth) Fail();
    SkipSpace();
    if (Takes("{")) {
      c10::impl::GenericDict entries(c10::AnyType::get(), c10::AnyType::get());
      Items('}', [&] {
        if (!Takes("\"")) Fail();
        std::string key = String();
        SkipSpace();
        if (!Takes(":")) Fail();
        entries.insert_or_assign(std::move(key), Value(depth + 1));
      });
      return entries;
    }
    if (Takes("[")) {
      c10::impl::GenericList items(c10::AnyType::get());
      Items(']', [&] { items.push_back(Value(depth + 1)); });
      return items;
    }
    if (Takes("\"")) return String();
    if (Takes("true")) return true;
    if (Takes("false")) return false;
    if (Takes("null")) return std::numeric_limits<double>::quiet_NaN();
    return Number();
  }
  // NOLINTEND(misc-no-recursion)

  c10::IValue Number() {
    const char* const end = text_.data() + text_.size();
    int64_t integer = 0;
    const auto whole = std::from_chars(text_.data(), end, integer);
    double number = 0;
    const auto real = std::from_chars(text_.data(), end, number);
    if (real.ec != std::errc() || !std::isfinite(number)) {
      Fail();
    }
    text_.remove_prefix(static_cast<size_t>(real.ptr - text_.data()));
    if (whole.ec == std::errc() && whole.ptr == real.ptr) return integer;
    return number;
  }

  uint32_t Hex() {
    uint32_t code = 0;
    const std::string_view digits = text_.substr(0, 4);
    const char* const end = digits.data() + digits.size();
    if (digits.size() < 4 ||
        std::from_chars(digits.data(), end, code, 16).ptr != end) {
      Fail();
    }
    text_.remove_prefix(4);
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
      if (Takes("u")) {
        uint32_t code = Hex();
        if (code >= 0xD800 && code < 0xDC00 && Takes("\\u")) {
          code = 0x10000 + ((code - 0xD800) << 10) + (Hex() - 0xDC00);
        }
        text += Utf8(code);
        continue;
      }
      const size_t which = kEscapes.find(Next());
      if (which == std::string_view::npos) Fail();
      text += kMeanings[which];
    }
    return text;
  }

  std::string_view text_;
};

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", c);
      quoted += escape.data();
      continue;
    }
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

}  // namespace

c10::IValue ParseJson(std::string_view text) { return Reader(text).Whole(); }

// NOLINTNEXTLINE(misc-no-recursion): as deep as what is written.
std::string ToJson(const c10::IValue& value) {
  if (value.isString()) return Quoted(value.toStringRef());
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isDouble() && std::isfinite(value.toDouble())) {
    std::array<char, 32> digits{};
    const auto end =
        std::to_chars(digits.begin(), digits.end(), value.toDouble());
    return {digits.data(), end.ptr};
  }
  std::string text;
  if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      text += (text.empty() ? "" : ", ") + ToJson(item);
    }
    return "[" + text + "]";
  }
  if (!value.isGenericDict()) return "null";
  for (const auto& entry : value.toGenericDict()) {
    text += (text.empty() ? "" : ", ") + Quoted(entry.key().toStringRef()) +
            ": " + ToJson(entry.value());
  }
  return "{" + text + "}";
}

}  // namespace torch_sgmcmc
