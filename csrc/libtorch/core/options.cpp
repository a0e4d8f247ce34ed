#include "torch_sgmcmc/options.h"

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <cmath>
#include <stdexcept>
#include <string_view>

#include "host/settings.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/parameters.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {

namespace {

constexpr double kExactIntegers = 9007199254740992.0;  // 2^53

// Whether it is a number that can be looked at.
bool IsNumber(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const at::Tensor& tensor = value.toTensor();
  return tensor.numel() == 1 && tensor.layout() == at::kStrided &&
         !tensor.is_meta();
}

[[noreturn]] void WrongType(std::string_view name,
                            const c10::IValue& value,
                            const char* wanted) {
  Invalid("Invalid " + std::string(name) + " in a state dict: a " +
          KindOf(value) + " (must be " + wanted + ")");
}

// Something or none, or something of one kind.
template <typename T>
constexpr bool kIsOptional = false;
template <typename T>
constexpr bool kIsOptional<std::optional<T>> = true;
template <typename T>
constexpr bool kIsList = false;
template <typename T>
constexpr bool kIsList<std::vector<T>> = true;

// As a setting's row says that it must be in a state dict.
c10::IValue ReadSetting(const Setting& row, const c10::IValue& value) {
  using detail::FromValue;
  if (row.optional && value.isNone()) return value;
  switch (row.kind) {
    case SettingKind::kWhole:
      return FromValue<int64_t>(row.name, value);
    case SettingKind::kFlag:
      return FromValue<bool>(row.name, value);
    case SettingKind::kWord:
      return FromValue<std::string>(row.name, value);
    case SettingKind::kReal:
      break;
  }
  if (row.words[0] != nullptr && value.isString()) return value;
  return detail::ToValue(row.name, FromValue<double>(row.name, value));
}

c10::IValue DefaultOf(const Setting& row) {
  if (row.optional) return {};
  if (row.kind == SettingKind::kWhole && !std::isnan(row.fallback)) {
    return static_cast<int64_t>(row.fallback);
  }
  if (row.kind == SettingKind::kFlag) return row.fallback == 1;
  if (row.kind == SettingKind::kWord) return std::string(row.words[0]);
  return row.fallback;
}

void CheckWord(const Setting& row, const std::string& value) {
  std::string wanted = row.kind == SettingKind::kWord ? "" : "a number";
  for (const char* word : row.words) {
    if (word == nullptr) break;
    if (value == word) return;
    wanted += (wanted.empty() ? "" : " or ") + Shown(word);
  }
  Invalid(std::string("Invalid ") + row.name + ": " + Shown(value) +
          " (must be " + wanted + ")");
}

// Throws if a value was left open that has no default, or is not in the range
// of its row.
void CheckSetting(const Setting& row,
                  const c10::IValue& value,
                  const char* sampler,
                  bool is_set) {
  if (value.isNone() || value.isBool()) return;
  if (value.isString()) return CheckWord(row, value.toStringRef());
  if (row.kind == SettingKind::kWhole) {
    return CheckInteger(
        row.name, value.toInt(), static_cast<int64_t>(row.low), row.high);
  }
  const double number =
      value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
  if (row.purpose != nullptr && !is_set && std::isnan(number)) {
    Invalid(std::string("Invalid ") + row.name + ": not set (" + sampler +
            " needs " + row.purpose + ")");
  }
  CheckReal(row.name, number, row.range());
}

}  // namespace

namespace detail {

template <typename T>
c10::IValue ToValue(std::string_view name, const T& value) {
  if constexpr (kIsOptional<T>) {
    return value ? ToValue(name, *value) : c10::IValue();
  } else if constexpr (kIsList<T>) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const auto& element : value) list.push_back(element);
    return list;
  } else if constexpr (std::is_same_v<T, Count>) {
    return value.saved();
  } else if constexpr (std::is_same_v<T, NumberOrWord>) {
    return std::visit([&](const auto& held) { return ToValue(name, held); },
                      value);
  } else {
    if constexpr (std::is_same_v<T, double>) {
      // A count of data, which Python's users give as an int.
      if (name == "num_data" && value == std::floor(value) &&
          std::abs(value) < kExactIntegers) {
        return static_cast<int64_t>(value);
      }
    }
    return value;
  }
}

template <typename T>
T FromValue(std::string_view name, const c10::IValue& value) {
  if constexpr (kIsOptional<T>) {
    if (value.isNone()) return {};
    return FromValue<typename T::value_type>(name, value);
  } else if constexpr (kIsList<T>) {
    using Element = typename T::value_type;
    constexpr bool kIsReal = std::is_same_v<Element, double>;
    if (!value.isList()) {
      WrongType(name, value, kIsReal ? "a list of numbers" : "a list of ints");
    }
    T result;
    for (const c10::IValue& element : value.toListRef()) {
      result.push_back(FromValue<Element>(name, element));
    }
    return result;
  } else if constexpr (std::is_same_v<T, double>) {
    if (value.isDouble()) return value.toDouble();
    if (value.isInt()) return static_cast<double>(value.toInt());
    if (IsNumber(value) && value.toTensor().is_floating_point()) {
      return value.toTensor().item<double>();  // a step size may be one
    }
    WrongType(name, value, "a number");
  } else if constexpr (std::is_same_v<T, int64_t>) {
    if (!value.isInt()) WrongType(name, value, "an int");
    return value.toInt();
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!value.isBool()) WrongType(name, value, "a bool");
    return value.toBool();
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (!value.isString()) WrongType(name, value, "a string");
    return value.toStringRef();
  } else if constexpr (std::is_same_v<T, NumberOrWord>) {
    if (value.isString()) return value.toStringRef();
    return FromValue<double>(name, value);
  } else {
    static_assert(std::is_same_v<T, Count>);
    if (value.isInt()) return {value.toInt()};
    if (IsNumber(value) && value.toTensor().scalar_type() == at::kLong) {
      return {0, value.toTensor()};
    }
    WrongType(name, value, "an int, or a Tensor of one int64");
  }
}

// All types of hyperparameters, and of what samplers keep count of.
#define TORCH_SGMCMC_CONVERT(...)                                     \
  template c10::IValue ToValue(std::string_view, const __VA_ARGS__&); \
  template __VA_ARGS__ FromValue(std::string_view, const c10::IValue&)
TORCH_SGMCMC_CONVERT(double);
TORCH_SGMCMC_CONVERT(int64_t);
TORCH_SGMCMC_CONVERT(bool);
TORCH_SGMCMC_CONVERT(std::string);
TORCH_SGMCMC_CONVERT(NumberOrWord);
TORCH_SGMCMC_CONVERT(Count);
TORCH_SGMCMC_CONVERT(std::optional<double>);
TORCH_SGMCMC_CONVERT(std::optional<int64_t>);
TORCH_SGMCMC_CONVERT(std::vector<double>);
TORCH_SGMCMC_CONVERT(std::optional<std::vector<double>>);
TORCH_SGMCMC_CONVERT(std::vector<int64_t>);
#undef TORCH_SGMCMC_CONVERT

}  // namespace detail

SamplerOptions::SamplerOptions(const char* sampler) : sampler_(sampler) {
  for (const Setting& row : SettingsOf(sampler)) {
    values_.push_back({row.name, &row, nullptr, DefaultOf(row)});
  }
}

size_t SamplerOptions::place_of(std::string_view name) const {
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i].name == name) return i;
  }
  throw std::out_of_range(std::string(sampler_) + " has no hyperparameter " +
                          std::string(name));
}

double SamplerOptions::number_or(std::string_view name,
                                 double otherwise) const {
  for (const Value& each : values_) {
    if (each.name != name) continue;
    const c10::IValue& value = each.value;
    if (value.isDouble()) return value.toDouble();
    if (value.isInt()) return static_cast<double>(value.toInt());
    return value.isBool() ? static_cast<double>(value.toBool()) : kNone;
  }
  return otherwise;
}

void SamplerOptions::check_values() const {
  for (const Value& each : values_) {
    if (each.row == nullptr) continue;
    CheckSetting(*each.row, each.value, sampler_, each.is_set);
  }
}

void SamplerOptions::check_noise_estimate(double friction,
                                          const char* what) const {
  const c10::IValue& given = values_[place_of("noise_estimate")].value;
  const bool is_word = given.isString();
  const double value = is_word ? 0 : given.toDouble();
  if (!is_word && value == 0) return;
  std::string where;
  if (estimate_scale_ != 1) {
    where = " at lr " + FourDigits(lr()) + ", from " + FourDigits(value) +
            " where it was given";
  }
  CheckFriction(value * estimate_scale_, friction, what, where);
  if (temperature() == 0) {
    Invalid("Invalid noise_estimate: " +
            (is_word ? Shown(given.toStringRef()) : Shown(value)) +
            " (must be 0 at temperature 0, where no noise is injected)");
  }
}

void SamplerOptions::inherit(const SamplerOptions& defaults) {
  for (size_t i = 0; i < values_.size(); ++i) {
    if (!values_[i].is_set) values_[i].value = defaults.values_[i].value;
  }
  are_in_range_ = false;
}

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
  for (size_t i = 0; i < values_.size(); ++i) {
    const Value& own = values_[i];
    if (own.row != nullptr && own.is_set && is_shared(own.name) &&
        !Alike(own.value, ours.values_[i].value)) {
      names.emplace_back(own.name);
    }
  }
  return names;
}

std::vector<std::string> SamplerOptions::common_keys() const {
  std::vector<std::string> names;
  for (const Value& each : values_) {
    if (each.row == nullptr || is_shared(each.name)) {
      names.emplace_back(each.name);
    }
  }
  return names;
}

bool SamplerOptions::agrees_with(const SamplerOptions& other) const {
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i].row == nullptr || !is_shared(values_[i].name)) continue;
    if (!Alike(values_[i].value, other.values_[i].value)) return false;
  }
  return true;
}

void SamplerOptions::share(const SamplerOptions& other) {
  capturable_ = other.capturable_;
  nonfinite_ = other.nonfinite_;
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i].row == nullptr || is_shared(values_[i].name)) {
      values_[i] = other.values_[i];
    }
  }
  are_in_range_ = false;
}

void SamplerOptions::take_progress(const SamplerOptions& other) {
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i].row == nullptr) values_[i] = other.values_[i];
  }
}

std::vector<std::string> SamplerOptions::keys() const {
  std::vector<std::string> names;
  for (const Value& each : values_) names.emplace_back(each.name);
  return names;
}

void SamplerOptions::write(StateDict& group) const {
  for (const Value& each : values_) {
    const c10::IValue& value = each.value;
    group.set(std::string(each.name),
              value.isList() ? value.toList().copy() : value);
  }
}

void SamplerOptions::read(const StateDict& group, int64_t index) {
  are_in_range_ = false;
  for (Value& each : values_) {
    if (!group.contains(std::string(each.name))) {
      Invalid("Invalid state_dict: param group " + std::to_string(index) +
              " lacks " + std::string(each.name) + "; it is not one of " +
              sampler_);
    }
    const c10::IValue value = group.at(std::string(each.name));
    each.value = each.row == nullptr ? each.read(each.name, value)
                                     : ReadSetting(*each.row, value);
    each.is_set = true;
  }
}

std::unique_ptr<SamplerOptions> SamplerOptions::copy() const {
  return std::unique_ptr<SamplerOptions>(
      static_cast<SamplerOptions*>(clone().release()));
}

void SamplerOptions::check_param(const at::Tensor& param) const {
  CheckParameter(sampler(), param);
  CheckChains(param, chains());
}

}  // namespace torch_sgmcmc
