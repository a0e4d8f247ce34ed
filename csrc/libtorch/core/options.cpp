#include "torch_sgmcmc/options.h"

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <cmath>

#include "host/settings.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/parameters.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {

void SamplerOptions::refuse_capturable() const {
  if (!capturable()) return;
  Invalid(std::string("Invalid capturable: true (") + sampler() +
          " decides on the host, which a CUDA graph cannot)");
}

std::vector<std::string> SamplerOptions::set_for_all(
    const SamplerOptions& ours) const {
  std::vector<std::string> names;
  if (seed_) names.emplace_back("seed");
  if (capturable_ && capturable() != ours.capturable()) {
    names.emplace_back("capturable");
  }
  if (nonfinite_ && nonfinite() != ours.nonfinite()) {
    names.emplace_back("nonfinite");
  }
  return names;
}

void SamplerOptions::share(const SamplerOptions& other) {
  capturable_ = other.capturable_;
  nonfinite_ = other.nonfinite_;
}

std::unique_ptr<SamplerOptions> SamplerOptions::copy() const {
  return std::unique_ptr<SamplerOptions>(
      static_cast<SamplerOptions*>(clone().release()));
}

void SamplerOptions::check_param(const at::Tensor& param) const {
  CheckParameter(sampler(), param);
  CheckChains(param, chains());
}

namespace detail {
namespace {

constexpr double kExactIntegers = 9007199254740992.0;  // 2^53

// Whether it is a number that can be looked at.
bool IsNumber(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const at::Tensor& tensor = value.toTensor();
  return tensor.numel() == 1 && tensor.layout() == at::kStrided &&
         !tensor.is_meta();
}

[[noreturn]] void WrongType(const char* name,
                            const c10::IValue& value,
                            const char* wanted) {
  Invalid(std::string("Invalid ") + name + " in a state dict: a " +
          KindOf(value) + " (must be " + wanted + ")");
}

template <typename T>
c10::IValue ListOf(const std::vector<T>& values) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const T& value : values) list.push_back(value);
  return list;
}

}  // namespace

c10::IValue ToValue(const char* name, double value) {
  // A count of data, which Python's users give as an int.
  if (std::string(name) == "num_data" && value == std::floor(value) &&
      std::abs(value) < kExactIntegers) {
    return static_cast<int64_t>(value);
  }
  return value;
}

c10::IValue ToValue(const char*, int64_t value) { return value; }

c10::IValue ToValue(const char*, const std::string& value) { return value; }

c10::IValue ToValue(const char*, bool value) { return value; }

c10::IValue ToValue(const char*, const Count& value) { return value.saved(); }

c10::IValue ToValue(const char* name, const NumberOrWord& value) {
  return std::visit([&](const auto& held) { return ToValue(name, held); },
                    value);
}

void FromValue(const char* name, const c10::IValue& value, double& result) {
  if (value.isInt()) {
    result = static_cast<double>(value.toInt());
  } else if (value.isDouble()) {
    result = value.toDouble();
  } else if (IsNumber(value) && value.toTensor().is_floating_point()) {
    result = value.toTensor().item<double>();  // a step size may be one
  } else {
    WrongType(name, value, "a number");
  }
}

void FromValue(const char* name, const c10::IValue& value, int64_t& result) {
  if (!value.isInt()) WrongType(name, value, "an int");
  result = value.toInt();
}

void FromValue(const char* name,
               const c10::IValue& value,
               std::string& result) {
  if (!value.isString()) WrongType(name, value, "a string");
  result = value.toStringRef();
}

void FromValue(const char* name, const c10::IValue& value, bool& result) {
  if (!value.isBool()) WrongType(name, value, "a bool");
  result = value.toBool();
}

void FromValue(const char* name, const c10::IValue& value, Count& result) {
  if (value.isInt()) {
    result = {value.toInt()};
  } else if (IsNumber(value) && value.toTensor().scalar_type() == at::kLong) {
    result = {0, value.toTensor()};
  } else {
    WrongType(name, value, "an int, or a Tensor of one int64");
  }
}

c10::IValue ToValue(const char*, const std::vector<double>& values) {
  return ListOf(values);
}

void FromValue(const char* name,
               const c10::IValue& value,
               std::vector<double>& result) {
  if (!value.isList()) WrongType(name, value, "a list of numbers");
  result.clear();
  for (const c10::IValue& element : value.toList().vec()) {
    FromValue(name, element, result.emplace_back());
  }
}

c10::IValue ToValue(const char*, const std::vector<int64_t>& values) {
  return ListOf(values);
}

void FromValue(const char* name,
               const c10::IValue& value,
               std::vector<int64_t>& result) {
  if (!value.isList()) WrongType(name, value, "a list of ints");
  result.clear();
  for (const c10::IValue& element : value.toList().vec()) {
    FromValue(name, element, result.emplace_back());
  }
}

void FromValue(const char* name,
               const c10::IValue& value,
               NumberOrWord& result) {
  if (value.isString()) {
    result = value.toStringRef();
  } else {
    double number = 0;
    FromValue(name, value, number);
    result = number;
  }
}

std::vector<const Setting*> FindSettings(
    const char* sampler, const std::vector<std::string>& names) {
  std::vector<const Setting*> rows;
  for (const std::string& name : names) {
    const Setting* found = nullptr;
    for (const Setting& row : SettingsOf(sampler)) {
      if (name == row.name) found = &row;
    }
    rows.push_back(found);
  }
  return rows;
}

void CheckSetting(const Setting& row,
                  const char* sampler,
                  double value,
                  bool is_set) {
  if (row.purpose != nullptr && !is_set && std::isnan(value)) {
    Invalid(std::string("Invalid ") + row.name + ": not set (" + sampler +
            " needs " + row.purpose + ")");
  }
  CheckReal(row.name,
            value,
            {.low = row.low, .high = row.high, .low_open = row.low_open});
}

void CheckSetting(const Setting& row,
                  const char* /*sampler*/,
                  int64_t value,
                  bool /*is_set*/) {
  CheckInteger(row.name, value, static_cast<int64_t>(row.low), row.high);
}

void CheckSetting(const Setting& row,
                  const char* /*sampler*/,
                  const std::string& value,
                  bool /*is_set*/) {
  std::string wanted = row.kind == SettingKind::kWord ? "" : "a number";
  for (const char* word : row.words) {
    if (word == nullptr) break;
    if (value == word) return;
    wanted += (wanted.empty() ? "" : " or ") + Shown(word);
  }
  Invalid(std::string("Invalid ") + row.name + ": " + Shown(value) +
          " (must be " + wanted + ")");
}

c10::IValue Find(const StateDict& group,
                 int64_t index,
                 const char* name,
                 const char* sampler) {
  if (!group.contains(name)) {
    Invalid("Invalid state_dict: param group " + std::to_string(index) +
            " lacks " + name + "; it is not one of " + sampler);
  }
  return group.at(name);
}

}  // namespace detail
}  // namespace torch_sgmcmc
