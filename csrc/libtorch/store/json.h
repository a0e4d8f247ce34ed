// JSON, as far as the files of a store need it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace torch_sgmcmc {

// A value that was read. The accessors throw std::runtime_error if it is of
// another type.
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;

  // Throws std::runtime_error if the text is not one value of JSON.
  static Json Parse(std::string_view text);

  bool IsNull() const { return value_.index() == 0; }
  int64_t Integer() const;
  double Number() const;  // NaN for null
  const std::string& Text() const;
  const Array& Items() const;
  const Object& Entries() const;
  // The value of a key.
  const Json& At(std::string_view key) const;
  const Json* Find(std::string_view key) const;

 private:
  friend class JsonReader;
  std::
      variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object>
          value_;
};

// A string as JSON has it, in quotes.
std::string Quoted(std::string_view text);
// A number with as many digits as it takes to read it back; null if it is not
// finite.
std::string JsonNumber(double value);
// [a, b, c]
template <typename Range, typename Function>
std::string JsonArray(const Range& values, Function text_of) {
  std::string text = "[";
  for (const auto& value : values) {
    if (text.size() > 1) text += ", ";
    text += text_of(value);
  }
  return text + "]";
}

}  // namespace torch_sgmcmc
