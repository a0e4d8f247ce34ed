// Hyperparameters of a param group.
//
// Every hyperparameter knows whether it was set. What a param group leaves open
// is taken from the sampler's own options, and what these leave open from the
// library's defaults, as with the dicts of Python's param groups:
//
//   std::vector<torch::optim::OptimizerParamGroup> groups;
//   groups.emplace_back(body->parameters());
//   groups.emplace_back(head->parameters(),
//                       std::make_unique<SGLDOptions>(
//                           SGLDOptions().prior_precision(10)));
//   SGLD sampler(std::move(groups), SGLDOptions(0.1).num_data(50'000));
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "torch_sgmcmc/count.h"
#include "torch_sgmcmc/export.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

struct Setting;  // csrc/host/settings.h

/// A value and whether it was set.
template <typename T>
class Hyperparameter {
 public:
  Hyperparameter() = default;
  // cppcheck-suppress noExplicitConstructor
  // NOLINTNEXTLINE(google-explicit-constructor): for `= 0.9` after a name.
  Hyperparameter(T fallback) : value_(std::move(fallback)) {}

  const T& get() const { return value_; }
  bool is_set() const { return is_set_; }
  void set(T value) {
    value_ = std::move(value);
    is_set_ = true;
  }
  void inherit(const Hyperparameter& other) {
    if (!is_set_) value_ = other.value_;
  }

 private:
  T value_{};
  bool is_set_ = false;
};

// A hyperparameter of a class of options, as torch's TORCH_ARG: what is read by
// its name, and set by it in a chain. Then comes the default, if it is not the
// type's.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define TORCH_SGMCMC_ARG(T, name)                 \
 public:                                          \
  const T& name() const { return name##_.get(); } \
  auto name(T value)->decltype(*this) {           \
    name##_.set(std::move(value));                \
    return *this;                                 \
  }                                               \
                                                  \
 private:                                         \
  ::torch_sgmcmc::Hyperparameter<T> name##_
// NOLINTEND(bugprone-macro-parentheses)

// Where there is no need to allocate.
using NumbersOfGroup = c10::SmallVector<double, 16>;

/// Whether a value is a param group's own, equal in all groups, or what the
/// sampler keeps count of, in all groups.
enum class Scope { kOwn, kShared, kProgress };

/// What the options of all samplers have in common.
class TORCH_SGMCMC_API SamplerOptions : public torch::optim::OptimizerOptions {
 public:
  double lr() const { return lr_.get(); }
  double num_data() const { return num_data_.get(); }
  double prior_precision() const { return prior_precision_.get(); }
  double prior_mean() const { return prior_mean_.get(); }
  double temperature() const { return temperature_.get(); }
  bool capturable() const { return capturable_.value_or(false); }
  std::string nonfinite() const { return nonfinite_.value_or("raise"); }

  /// Sets λ, for whoever holds a group of any sampler.
  void set_prior_precision(double value) { prior_precision_.set(value); }

  /// As set for a sampler to be, which then has it (Sampler::seed()).
  std::optional<int64_t> seed() const { return seed_; }

  // What torch's learning-rate schedulers use.
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr_.set(value); }

  // What a sampler uses.

  /// The name of the sampler that takes these options.
  virtual const char* sampler() const = 0;
  /// Throws std::invalid_argument if a value is out of range.
  virtual void check() const = 0;
  /// Throws if what a saved group says of the chain's progress is invalid.
  virtual void check_progress() const {}
  /// Why what is shared must be equal in all groups.
  virtual const char* why_equal() const {
    return "there is one stream of noise for all";
  }
  /// Takes what is not set from others, which must be of the same class.
  virtual void inherit(const SamplerOptions& defaults) = 0;
  /// What was set here, is for the whole sampler, and is not as in its options.
  virtual std::vector<std::string> set_for_all(
      const SamplerOptions& ours) const;
  /// The keys whose values are equal in all groups.
  virtual std::vector<std::string> common_keys() const = 0;
  /// Whether the hyperparameters that groups share are equal.
  virtual bool agrees_with(const SamplerOptions& other) const = 0;
  /// Takes what is equal in all groups from another one.
  virtual void share(const SamplerOptions& other);
  std::unique_ptr<SamplerOptions> copy() const;
  /// Takes what the sampler keeps count of.
  virtual void take_progress(const SamplerOptions& other) = 0;
  /// K if parameters hold K chains.
  virtual std::optional<int64_t> chains() const { return std::nullopt; }
  /// K if each of them has a seed of its own, else 0.
  virtual int64_t chains_with_seeds() const { return 0; }
  /// Throws std::invalid_argument if a parameter does not suit these options.
  virtual void check_param(const at::Tensor& param) const;
  /// The keys that write() sets.
  virtual std::vector<std::string> keys() const = 0;
  /// Their values, where they are numbers, as operators take them; else 0.
  virtual NumbersOfGroup numbers() const = 0;
  /// Appends the hyperparameters to a param group of a state dict.
  virtual void write(StateDict& group) const = 0;
  /// Takes the hyperparameters from the state dict's param group `index`.
  virtual void read(const StateDict& group, int64_t index) = 0;
  /// Values of nonfinite that the sampler takes.
  virtual std::vector<std::string> nonfinite_choices() const {
    return {"raise", "skip", "allow"};
  }

 protected:
  SamplerOptions() = default;

  /// Throws if capturable: of samplers that decide on the host.
  void refuse_capturable() const;

  /// Calls `visit` with name, member (and Scope, if it is not a group's own)
  /// of each hyperparameter, in the order of a state dict.
  template <typename Visit>
  static void fields(Visit visit) {
    visit("lr", &SamplerOptions::lr_);
    visit("num_data", &SamplerOptions::num_data_);
    visit("prior_precision", &SamplerOptions::prior_precision_);
    visit("prior_mean", &SamplerOptions::prior_mean_);
    visit("temperature", &SamplerOptions::temperature_);
  }

  static constexpr double kNotSet = std::numeric_limits<double>::quiet_NaN();
  Hyperparameter<double> lr_ = kNotSet;
  Hyperparameter<double> num_data_ = kNotSet;
  Hyperparameter<double> prior_precision_ = 0.0;
  Hyperparameter<double> prior_mean_ = 0.0;
  // Until a sampler has them, which keeps copies itself.
  std::vector<at::Tensor> prior_means_;
  bool means_are_kept_ = false;
  Hyperparameter<double> temperature_ = 1.0;
  std::optional<bool> capturable_;
  std::optional<std::string> nonfinite_;
  std::optional<int64_t> seed_;

 private:
  friend class Sampler;

  // Whether a sampler has looked at what they leave open.
  bool is_complete_ = false;
};

namespace detail {

// The conversions between hyperparameters and values of state dicts.
TORCH_SGMCMC_API c10::IValue ToValue(const char* name, double value);
TORCH_SGMCMC_API c10::IValue ToValue(const char* name, int64_t value);
TORCH_SGMCMC_API c10::IValue ToValue(const char* name,
                                     const std::string& value);
TORCH_SGMCMC_API void FromValue(const char* name,
                                const c10::IValue& value,
                                double& result);
TORCH_SGMCMC_API void FromValue(const char* name,
                                const c10::IValue& value,
                                int64_t& result);
TORCH_SGMCMC_API void FromValue(const char* name,
                                const c10::IValue& value,
                                std::string& result);
TORCH_SGMCMC_API c10::IValue ToValue(const char* name, bool value);
TORCH_SGMCMC_API void FromValue(const char* name,
                                const c10::IValue& value,
                                bool& result);
TORCH_SGMCMC_API c10::IValue ToValue(const char* name, const Count& value);
TORCH_SGMCMC_API void FromValue(const char* name,
                                const c10::IValue& value,
                                Count& result);
TORCH_SGMCMC_API c10::IValue ToValue(const char* name,
                                     const std::vector<double>& values);
TORCH_SGMCMC_API void FromValue(const char* name,
                                const c10::IValue& value,
                                std::vector<double>& result);
TORCH_SGMCMC_API c10::IValue ToValue(const char* name,
                                     const std::vector<int64_t>& values);
TORCH_SGMCMC_API void FromValue(const char* name,
                                const c10::IValue& value,
                                std::vector<int64_t>& result);
// A number or a word.
using NumberOrWord = std::variant<double, std::string>;
TORCH_SGMCMC_API c10::IValue ToValue(const char* name,
                                     const NumberOrWord& value);
TORCH_SGMCMC_API void FromValue(const char* name,
                                const c10::IValue& value,
                                NumberOrWord& result);
// Something or None.
template <typename T>
c10::IValue ToValue(const char* name, const std::optional<T>& value) {
  return value ? ToValue(name, *value) : c10::IValue();
}
template <typename T>
void FromValue(const char* name,
               const c10::IValue& value,
               std::optional<T>& result) {
  result.reset();
  if (!value.isNone()) FromValue(name, value, result.emplace());
}
// As an operator takes it; 0 if it is no number.
template <typename T>
double NumberOf(const T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<double>(value);
  } else if constexpr (std::is_same_v<T, std::optional<double>>) {
    return value.value_or(0);
  } else if constexpr (std::is_same_v<T, NumberOrWord>) {
    const double* number = std::get_if<double>(&value);
    return number == nullptr ? 0 : *number;
  } else {
    return 0;
  }
}
// Of each name the row in the table of hyperparameters, null if there is none.
TORCH_SGMCMC_API std::vector<const Setting*> FindSettings(
    const char* sampler, const std::vector<std::string>& names);
// Throws std::invalid_argument if a value was left open that has no default, or
// is not in the range of its row.
TORCH_SGMCMC_API void CheckSetting(const Setting& row,
                                   const char* sampler,
                                   double value,
                                   bool is_set);
TORCH_SGMCMC_API void CheckSetting(const Setting& row,
                                   const char* sampler,
                                   int64_t value,
                                   bool is_set);
TORCH_SGMCMC_API void CheckSetting(const Setting& row,
                                   const char* sampler,
                                   const std::string& value,
                                   bool is_set);
inline void CheckSetting(const Setting&, const char*, bool, bool) {}
template <typename T>
void CheckSetting(const Setting& row,
                  const char* sampler,
                  const std::optional<T>& value,
                  bool is_set) {
  if (value) CheckSetting(row, sampler, *value, is_set);
}
inline void CheckSetting(const Setting& row,
                         const char* sampler,
                         const NumberOrWord& value,
                         bool is_set) {
  std::visit([&](const auto& v) { CheckSetting(row, sampler, v, is_set); },
             value);
}
// group.at(name), or an error that names the sampler whose group it is not.
TORCH_SGMCMC_API c10::IValue Find(const StateDict& group,
                                  int64_t index,
                                  const char* name,
                                  const char* sampler);

}  // namespace detail

/// Options of the sampler that Derived belongs to: setters that can be chained,
/// and, by Derived::fields(), everything that goes through all hyperparameters.
template <typename Derived>
class OptionsOf : public SamplerOptions {
 public:
  /// Options of a param group, which takes lr from the sampler.
  OptionsOf() = default;
  /// Options with the given step size on SGD's scale.
  explicit OptionsOf(double lr) { lr_.set(lr); }

  using SamplerOptions::capturable;
  using SamplerOptions::lr;
  using SamplerOptions::nonfinite;
  using SamplerOptions::num_data;
  using SamplerOptions::prior_mean;
  using SamplerOptions::prior_precision;
  using SamplerOptions::seed;
  using SamplerOptions::temperature;

  /// Step size on SGD's scale, >= 0.
  Derived& lr(double value) { return set(lr_, value); }
  /// N, the number of training examples, > 0; 1 means that the loss is U
  /// itself. Must be set, here or for the sampler.
  Derived& num_data(double value) { return set(num_data_, value); }
  /// λ >= 0, precision of the Gaussian prior N(μ, 1/λ) on each parameter; 0 is
  /// a flat prior. Default: 0.
  Derived& prior_precision(double value) {
    return set(prior_precision_, value);
  }
  /// μ, one number for all parameters. Default: 0.
  Derived& prior_mean(double value) {
    prior_means_.clear();
    means_are_kept_ = false;
    return set(prior_mean_, value);
  }
  /// μ, a tensor for each of a group's parameters, of its shape. The sampler
  /// takes copies of what they are when it is made, the group is added, or at
  /// the next step; they are then its state. Of several groups each needs its
  /// own.
  Derived& prior_mean(const std::vector<at::Tensor>& values) {
    prior_means_ = values;
    means_are_kept_ = false;
    return set(prior_mean_, 0.0);
  }
  /// T >= 0; 1 is the Bayesian posterior, 0 an optimizer without noise.
  /// Default: 1.
  Derived& temperature(double value) { return set(temperature_, value); }
  /// Key of the noise, for a sampler to be: set later, it is refused. If it is
  /// not set, one is drawn from torch's default generator, so that
  /// torch::manual_seed makes it repeatable. No two samplers should have the
  /// same, see seeds.h.
  Derived& seed(int64_t value) {
    seed_ = value;
    return self();
  }
  /// Keep the step counter in device memory, so that step() can be captured in
  /// a CUDA graph: every replay then injects fresh noise. For a sampler to be.
  /// Default: false.
  Derived& capturable(bool value) {
    capturable_ = value;
    return self();
  }
  /// What to do about gradients that are not finite: "raise", "skip" or "allow"
  /// (see Sampler, also on clipping). For the whole sampler. Default: "raise".
  Derived& nonfinite(const std::string& value) {
    nonfinite_ = value;
    return self();
  }

  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }

  void check() const override {
    static const auto rows = detail::FindSettings(sampler(), keys());
    auto row = rows.begin();
    Derived::fields([&](const char*, auto member, Scope = Scope::kOwn) {
      const auto& hyperparameter = self().*member;
      // What a sampler keeps count of, of other types, is in no row.
      if constexpr (requires {
                      detail::CheckSetting(**row,
                                           sampler(),
                                           hyperparameter.get(),
                                           hyperparameter.is_set());
                    }) {
        if (*row != nullptr) {
          detail::CheckSetting(
              **row, sampler(), hyperparameter.get(), hyperparameter.is_set());
        }
      }
      ++row;
    });
  }

  void inherit(const SamplerOptions& defaults) override {
    const auto& from = static_cast<const Derived&>(defaults);
    Derived::fields([&](const char*, auto member, Scope = Scope::kOwn) {
      (self().*member).inherit(from.*member);
    });
  }

  std::vector<std::string> set_for_all(
      const SamplerOptions& ours) const override {
    auto names = SamplerOptions::set_for_all(ours);
    const auto& known = static_cast<const Derived&>(ours);
    Derived::fields(
        [&](const char* name, auto member, Scope extent = Scope::kOwn) {
          if (extent == Scope::kShared && (self().*member).is_set() &&
              (self().*member).get() != (known.*member).get()) {
            names.emplace_back(name);
          }
        });
    return names;
  }

  std::vector<std::string> common_keys() const override {
    std::vector<std::string> names;
    Derived::fields([&](const char* name, auto, Scope extent = Scope::kOwn) {
      if (extent != Scope::kOwn) names.emplace_back(name);
    });
    return names;
  }

  bool agrees_with(const SamplerOptions& other) const override {
    bool equal = true;
    const auto& theirs = static_cast<const Derived&>(other);
    Derived::fields([&](const char*, auto member, Scope extent = Scope::kOwn) {
      if (extent == Scope::kShared) {
        equal = equal && (self().*member).get() == (theirs.*member).get();
      }
    });
    return equal;
  }

  void share(const SamplerOptions& other) override {
    SamplerOptions::share(other);
    const auto& from = static_cast<const Derived&>(other);
    Derived::fields([&](const char*, auto member, Scope extent = Scope::kOwn) {
      if (extent != Scope::kOwn) self().*member = from.*member;
    });
  }

  void take_progress(const SamplerOptions& other) override {
    const auto& from = static_cast<const Derived&>(other);
    Derived::fields([&](const char*, auto member, Scope extent = Scope::kOwn) {
      if (extent == Scope::kProgress) self().*member = from.*member;
    });
  }

  void write(StateDict& group) const override {
    Derived::fields([&](const char* name, auto member, Scope = Scope::kOwn) {
      group.set(name, detail::ToValue(name, (self().*member).get()));
    });
  }

  std::vector<std::string> keys() const override {
    std::vector<std::string> names;
    Derived::fields([&](const char* name, auto, Scope = Scope::kOwn) {
      names.emplace_back(name);
    });
    return names;
  }

  NumbersOfGroup numbers() const override {
    NumbersOfGroup values;
    Derived::fields([&](const char*, auto member, Scope = Scope::kOwn) {
      values.push_back(detail::NumberOf((self().*member).get()));
    });
    return values;
  }

  void read(const StateDict& group, int64_t index) override {
    Derived::fields([&](const char* name, auto member, Scope = Scope::kOwn) {
      auto value = (self().*member).get();
      detail::FromValue(
          name, detail::Find(group, index, name, sampler()), value);
      (self().*member).set(std::move(value));
    });
  }

 protected:
  template <typename T>
  Derived& set(Hyperparameter<T>& hyperparameter, T value) {
    hyperparameter.set(std::move(value));
    return self();
  }

 private:
  Derived& self() { return static_cast<Derived&>(*this); }
  const Derived& self() const { return static_cast<const Derived&>(*this); }
};

/// Options of a sampler that goes by gradients alone, of which many chains can
/// run at once.
template <typename Derived>
class ManyChainsOf : public OptionsOf<Derived> {
 public:
  using OptionsOf<Derived>::OptionsOf;

  const std::optional<int64_t>& num_chains() const { return num_chains_.get(); }
  /// K makes K independent chains at once, one for each index of the
  /// parameters' leading dimension, whose loss is the sum of the chains' mean
  /// losses. Chain k is the chain of a sampler with the seed fold_in(seed, k),
  /// bit for bit. For the whole sampler. Default: none, one chain.
  Derived& num_chains(std::optional<int64_t> value) {
    return this->set(num_chains_, value);
  }

  std::optional<int64_t> chains() const override { return num_chains(); }
  int64_t chains_with_seeds() const override {
    return num_chains().value_or(0);
  }

 protected:
  friend OptionsOf<Derived>;

  template <typename Visit>
  static void fields(Visit visit) {
    SamplerOptions::fields(visit);
    visit("num_chains", &ManyChainsOf::num_chains_, Scope::kShared);
  }

 private:
  Hyperparameter<std::optional<int64_t>> num_chains_;
};

}  // namespace torch_sgmcmc
