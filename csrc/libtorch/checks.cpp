#include "libtorch/checks.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <sstream>
#include <string>

namespace torch_sgmcmc {

std::string Shown(double value) {
  std::string text = Shortest(value);
  // Shows that it is not an integer.
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string Shown(const std::string& value) { return "'" + value + "'"; }

std::string Enumerated(const std::vector<std::string>& names,
                       const char* last) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 < names.size() ? ", " : last;
    text += names[i];
  }
  return text;
}

void CheckWord(const char* name, const std::string& value,
               const std::vector<std::string>& words, bool or_number) {
  std::vector<std::string> wanted;
  if (or_number) wanted.emplace_back("a number");
  for (const std::string& word : words) {
    if (value == word) return;
    wanted.push_back(Shown(word));
  }
  Invalid("Invalid ", name, ": ", Shown(value), " (must be ",
          Enumerated(wanted, " or "), ")");
}

void CheckReal(const char* name, double value, const Range& range) {
  if (range.Has(value)) return;
  Invalid("Invalid ", name, ": ", Shown(value), " (must be ", range.Wanted(),
          ")");
}

void CheckInteger(const char* name, int64_t value, int64_t low, double high) {
  if (value >= low && static_cast<double>(value) < high) return;
  const std::string least = std::to_string(low);
  Invalid("Invalid ", name, ": ", value, " (must be ",
          (std::isinf(high) ? ">= " + least
                            : "in [" + least + ", " + Shortest(high - 1) + "]"),
          ")");
}

void CheckCount(const char* name, int64_t value) {
  CheckInteger(name, value);
  if (value < int64_t{1} << 62) return;
  Invalid("Invalid ", name, ": ", value, " (must be in [0, 2^62))");
}

void CheckPart(const char* name, int64_t count, const char* whole,
               int64_t most) {
  CheckCount(name, count);
  CheckCount(whole, most);
  if (count <= most) return;
  Invalid("Invalid ", name, ": ", count, " (must be at most ", whole, " = ",
          most, ")");
}

void CheckFriction(double noise_estimate, double friction, const char* what,
                   const std::string& where) {
  // momentum 0.9 and noise_estimate 0.1 add up to 1 only after rounding.
  if (noise_estimate > friction + 1e-12) {
    Invalid("Invalid noise_estimate: ", Rounded(noise_estimate), where,
            " (must not exceed the friction ", what, " = ", Rounded(friction),
            ": lower momentum or lr, or take larger minibatches)");
  }
}

void CheckTensor(const std::string& what, const c10::IValue& value,
                 c10::IntArrayRef shape, bool is_floating_point) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    Invalid(what, " is a ", KindOf(value), " (must be a Tensor)");
  }
  const at::Tensor& tensor = value.toTensor();
  if (tensor.layout() != at::kStrided || tensor.is_meta()) {
    Invalid(what, " has the layout ", LayoutName(tensor.layout()),
            " on the device ", tensor.device().str(),
            " (must be torch::kStrided, with numbers)");
  }
  if (tensor.sizes() != shape) {
    Invalid(what, " has shape ", Shape(tensor.sizes()), ", expected ",
            Shape(shape));
  }
  if (is_floating_point && !tensor.is_floating_point()) {
    Invalid(what, " is of ", DtypeName(tensor.scalar_type()),
            " (must be floating point)");
  }
}

std::string Shape(c10::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  }
  return text + "]";
}

std::string DtypeName(c10::ScalarType dtype) {
  return std::string("torch::k") + c10::toString(dtype);
}

std::string LayoutName(c10::Layout layout) {
  std::ostringstream name;
  name << "torch::k" << layout;
  return name.str();
}

std::string KindOf(const c10::IValue& value) {
  return value.isNone() ? "none" : value.tagKind();
}

std::string KeyText(const c10::IValue& key) {
  if (key.isString()) return key.toStringRef();
  return key.isInt() ? std::to_string(key.toInt())
                     : "a key that is a " + KindOf(key);
}

std::string Rounded(double value, int digits) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*g", digits, value);
  return text.data();
}

}  // namespace torch_sgmcmc
