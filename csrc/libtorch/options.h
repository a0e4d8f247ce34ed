// A param group's options: values by name, with the ranges and defaults of
// csrc/host/settings.cpp.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "host/settings.h"
#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

using Tensors = std::vector<at::Tensor>;
using ParamGroup = torch::optim::OptimizerParamGroup;
using LossClosure = torch::optim::Optimizer::LossClosure;

// A count on the host or, as an int64 scalar, on a device.
struct Count {
  int64_t host = 0;        // unless it is on a device
  at::Tensor device = {};  // undefined on the host

  bool is_on_device() const { return device.defined(); }
  // Waits for the device.
  int64_t get() const { return is_on_device() ? device.item<int64_t>() : host; }
  // In place, on the device too.
  void add(int64_t more) {
    if (is_on_device()) {
      device.add_(more);
    } else {
      host += more;
    }
  }
};

// A count in a state dict: Note [Ints of state dicts],
// torch_sgmcmc/core/state_dict.py.
c10::IValue SavedCount(const Count& count);
// The same for ints wider than 32 bits; other values unchanged.
c10::IValue Narrow(const c10::IValue& value);

// Conversions to and from a state dict's values. Reading throws
// std::invalid_argument for another type.
c10::IValue ToValue(const auto& value) { return value; }
inline c10::IValue ToValue(const Count& count) {
  return count.is_on_device() ? c10::IValue(count.device) : count.host;
}
template <typename T>
c10::IValue ToValue(const std::vector<T>& values) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const T& value : values) list.push_back(Narrow(value));
  return list;
}

[[noreturn]] void WrongType(std::string_view name, const c10::IValue& value,
                            const char* wanted);
double RealFrom(std::string_view name, const c10::IValue& value);
int64_t WholeFrom(std::string_view name, const c10::IValue& value);

template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

template <typename T>
T FromValue(std::string_view name, const c10::IValue& value) {
  if constexpr (kIsOptional<T>) {
    if (value.isNone()) return {};
    return FromValue<typename T::value_type>(name, value);
  } else if constexpr (std::is_same_v<T, double>) {
    return RealFrom(name, value);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return WholeFrom(name, value);
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!value.isBool()) WrongType(name, value, "a bool");
    return value.toBool();
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (!value.isString()) WrongType(name, value, "a string");
    return value.toStringRef();
  } else if constexpr (std::is_same_v<T, Count>) {
    if (value.isTensor()) return {0, value.toTensor()};
    return {value.toInt()};
  } else {
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
  }
}

// True if values are equal; NaN equals NaN.
bool Alike(const c10::IValue& a, const c10::IValue& b);

// Throws unless these keys' values are equal in all groups.
void CheckEqual(const std::vector<StateDict>& groups,
                const std::vector<std::string>& keys, const char* why);

// Values by name.
class NamedValues {
 public:
  const c10::IValue& value_of(std::string_view name) const {
    return values_[place_of(name)].value;
  }
  template <typename T>
  T get(std::string_view name) const {
    return FromValue<T>(name, value_of(name));
  }
  void put(std::string_view name, const c10::IValue& value);
  void add(std::string_view name, int64_t more) {
    put(name, get<int64_t>(name) + more);
  }
  // Adds a counter of a sampler.
  template <typename T>
  void keep(std::string_view name, const T& begin) {
    values_.push_back(
        {name, nullptr,
         [](std::string_view own, const c10::IValue& value) {
           using Saved =
               std::conditional_t<std::is_same_v<T, Count>, int64_t, T>;
           return ToValue(FromValue<Saved>(own, value));
         },
         ToValue(begin)});
  }
  bool is_set(std::string_view name) const {
    return values_[place_of(name)].is_set;
  }
  // A number or a flag; NaN for words and none, `otherwise` for unknown names.
  double number_or(std::string_view name, double otherwise) const;
  double number(std::string_view name) const;
  // An operator's number; 0 for words and none.
  double number_at(size_t place) const;
  // Throws std::out_of_range for unknown names.
  size_t place_of(std::string_view name) const;
  std::vector<std::string> keys() const;

  // To and from a state dict's param group, which has all keys.
  void write(StateDict& group) const;
  void read(const StateDict& group);

 protected:
  struct Value {
    std::string_view name;
    const Setting* row = nullptr;  // null for a counter
    // Reads a counter from a state dict.
    c10::IValue (*read)(std::string_view name,
                        const c10::IValue& value) = nullptr;
    c10::IValue value = {};
    bool is_set = false;
  };

  const char* sampler_ = "this sampler";
  std::vector<Value> values_;
  // True if the present values were checked.
  mutable bool is_checked_ = false;
};

class OptionValues : public NamedValues {
 public:
  explicit OptionValues(const char* sampler);

  const char* sampler() const { return sampler_; }
  double lr() const { return number("lr"); }
  double num_data() const { return number("num_data"); }
  double prior_precision() const { return number("prior_precision"); }
  double prior_mean() const { return number("prior_mean"); }
  double temperature() const { return number("temperature"); }
  bool is_capturable() const { return get<bool>("capturable"); }
  std::string nonfinite_choice() const { return get<std::string>("nonfinite"); }
  std::optional<int64_t> chains() const;

  // Throws std::invalid_argument if a value is out of range.
  void check_ranges() const;
  // Throws if a noise_estimate exceeds the friction `what`, or T is 0.
  void check_noise_estimate(double friction, const char* what) const;
  bool is_checked() const { return is_checked_; }
  void set_checked(bool value) const { is_checked_ = value; }

  // Takes values that are not set from the defaults.
  void inherit(const OptionValues& defaults);
  // True if values of these names are equal.
  bool agrees_with(const OptionValues& other,
                   const std::vector<std::string>& names) const;
  void share(const OptionValues& other, const std::vector<std::string>& names);
  // Names of shared options that were set here and differ from the sampler's.
  std::vector<std::string> set_for_all(
      const OptionValues& ours, const std::vector<std::string>& shared) const;

  // Until the sampler has copied them.
  Tensors prior_means;
  bool means_are_kept = false;
  std::optional<int64_t> seed;
  // The factor of a noise estimate of another lr, T or N.
  double estimate_scale = 1;
  // True if a sampler has completed these options.
  bool is_complete = false;
};

struct OptionAccess {
  static OptionValues& Of(torch::optim::OptimizerOptions& options) {
    return *static_cast<SamplerOptions&>(options).values_;
  }
  static const OptionValues& Of(const torch::optim::OptimizerOptions& options) {
    return *static_cast<const SamplerOptions&>(options).values_;
  }
};

}  // namespace torch_sgmcmc
