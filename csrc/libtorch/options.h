// Options of a param group as samplers use them: values by their names, with
// the ranges and defaults of csrc/host/settings.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "host/settings.h"
#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

// A count; on a device an int64 scalar, for which nobody has waited yet.
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

// Conversions between values and what state dicts hold. Reading throws
// std::invalid_argument if a value is of another type.
template <typename T>
c10::IValue ToValue(std::string_view name, const T& value);
template <typename T>
T FromValue(std::string_view name, const c10::IValue& value);

// As a state dict has it: Note [Ints of state dicts] in
// torch_sgmcmc/_impl/state_dict.py.
c10::IValue SavedCount(const Count& count);
// The same of an int that is too wide; all else is as it is.
c10::IValue Narrow(const c10::IValue& value);

// True if values are equal, where NaN is like NaN.
bool Alike(const c10::IValue& a, const c10::IValue& b);

// Throws unless the values of these keys are equal in all groups.
void CheckEqual(const std::vector<StateDict>& groups,
                const std::vector<std::string>& keys, const char* why);

// Values by their names, each of its type.
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
  // Adds a value of the sampler's own, as it begins.
  template <typename T>
  void keep(std::string_view name, const T& begin) {
    values_.push_back(
        {name, nullptr,
         [](std::string_view own, const c10::IValue& value) {
           using Saved =
               std::conditional_t<std::is_same_v<T, Count>, int64_t, T>;
           return ToValue(own, FromValue<Saved>(own, value));
         },
         ToValue(name, begin)});
  }
  bool is_set(std::string_view name) const {
    return values_[place_of(name)].is_set;
  }
  // A number, or a flag as one, by its name; NaN if it is a word or none, and
  // `otherwise` if there is none of this name.
  double number_or(std::string_view name, double otherwise) const;
  double number(std::string_view name) const;
  // One of the numbers that operators take; 0 if it is none, or a word.
  double number_at(size_t place) const {
    const c10::IValue& value = values_[place].value;
    if (value.isDouble()) return value.toDouble();
    return value.isInt() ? static_cast<double>(value.toInt()) : 0;
  }
  // Throws std::out_of_range if there is none of this name.
  size_t place_of(std::string_view name) const;
  std::vector<std::string> keys() const;

  // To and from a param group of a state dict, which has all keys.
  void write(StateDict& group) const;
  void read(const StateDict& group);

 protected:
  struct Value {
    std::string_view name;
    const Setting* row = nullptr;  // none of the sampler's own
    // From a state dict, of the sampler's own.
    c10::IValue (*read)(std::string_view name,
                        const c10::IValue& value) = nullptr;
    c10::IValue value = {};
    bool is_set = false;
  };

  std::vector<Value> values_;
  // True if a sampler has checked the values as they are.
  mutable bool is_checked_ = false;
};

class OptionValues : public NamedValues {
 public:
  // The defaults of the sampler with this name.
  explicit OptionValues(const char* sampler);

  const char* sampler() const { return sampler_; }
  double lr() const { return number("lr"); }
  double num_data() const { return number("num_data"); }
  double prior_precision() const { return number("prior_precision"); }
  double prior_mean() const { return number("prior_mean"); }
  double temperature() const { return number("temperature"); }
  bool is_capturable() const { return capturable.value_or(false); }
  std::string nonfinite_choice() const { return nonfinite.value_or("raise"); }
  // K if parameters hold K chains.
  std::optional<int64_t> chains() const;

  // Throws std::invalid_argument if a value is out of range.
  void check_ranges() const;
  // Throws if a noise_estimate exceeds the friction, which is `what`, or if
  // there is one, and no noise.
  void check_noise_estimate(double friction, const char* what) const;
  bool is_checked() const { return is_checked_; }
  void set_checked(bool value) const { is_checked_ = value; }

  // Takes what is not set from others of the same sampler.
  void inherit(const OptionValues& defaults);
  // True if values of these names are equal.
  bool agrees_with(const OptionValues& other,
                   const std::vector<std::string>& names) const;
  void share(const OptionValues& other, const std::vector<std::string>& names);
  // What was set here, is for the whole sampler, and is not as in its options.
  std::vector<std::string> set_for_all(
      const OptionValues& ours, const std::vector<std::string>& shared) const;

  // Until a sampler has them, which keeps copies itself.
  std::vector<at::Tensor> prior_means;
  bool means_are_kept = false;
  std::optional<bool> capturable;
  std::optional<std::string> nonfinite;
  std::optional<int64_t> seed;
  // The factor of a noise estimate that was given at another lr, T or N.
  double estimate_scale = 1;
  // True if a sampler has filled in what they leave open.
  bool is_complete = false;

 private:
  const char* sampler_;
};

// What options hold.
struct OptionAccess {
  static OptionValues& Of(torch::optim::OptimizerOptions& options) {
    return *static_cast<SamplerOptions&>(options).values_;
  }
  static const OptionValues& Of(const torch::optim::OptimizerOptions& options) {
    return *static_cast<const SamplerOptions&>(options).values_;
  }
};

}  // namespace torch_sgmcmc
