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
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "torch_sgmcmc/count.h"
#include "torch_sgmcmc/export.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

struct Setting;  // csrc/host/settings.h

namespace detail {

// A number or a word.
using NumberOrWord = std::variant<double, std::string>;

// The conversions between hyperparameters and values of state dicts.
template <typename T>
TORCH_SGMCMC_API c10::IValue ToValue(std::string_view name, const T& value);
template <typename T>
TORCH_SGMCMC_API T FromValue(std::string_view name, const c10::IValue& value);

}  // namespace detail

// A hyperparameter of a class of options, as torch's TORCH_ARG: what is read by
// its name, and set by it in a chain. Its default and range are in the table of
// all hyperparameters (csrc/host/settings.cpp).
// NOLINTBEGIN(bugprone-macro-parentheses)
#define TORCH_SGMCMC_ARG(T, name)                      \
  T name() const {                                     \
    static const size_t place = this->place_of(#name); \
    return this->template get_at<T>(place);            \
  }                                                    \
  auto name(const T& value)->decltype(*this) {         \
    this->put(#name, value);                           \
    return *this;                                      \
  }
// NOLINTEND(bugprone-macro-parentheses)

/// What the options of all samplers have in common.
class TORCH_SGMCMC_API SamplerOptions : public torch::optim::OptimizerOptions {
 public:
  double lr() const { return number("lr"); }
  double num_data() const { return number("num_data"); }
  double prior_precision() const { return number("prior_precision"); }
  double prior_mean() const { return number("prior_mean"); }
  double temperature() const { return number("temperature"); }
  bool capturable() const { return capturable_.value_or(false); }
  std::string nonfinite() const { return nonfinite_.value_or("raise"); }

  /// Sets λ, for whoever holds a group of any sampler.
  void set_prior_precision(double value) { put("prior_precision", value); }

  /// As set for a sampler to be, which then has it (Sampler::seed()).
  std::optional<int64_t> seed() const { return seed_; }

  // What torch's learning-rate schedulers use.
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { put("lr", value); }

  // What a sampler uses.

  /// The name of the sampler that takes these options.
  const char* sampler() const { return sampler_; }

  /// A hyperparameter, or what the sampler keeps count of, by its name.
  template <typename T>
  T get(std::string_view name) const {
    return get_at<T>(place_of(name));
  }
  template <typename T>
  T get_at(size_t place) const {
    return detail::FromValue<T>(values_[place].name, values_[place].value);
  }
  template <typename T>
  void put(std::string_view name, const T& value) {
    Value& own = values_[place_of(name)];
    own.value = detail::ToValue(own.name, value);
    own.is_set = true;
    are_in_range_ = false;
  }
  void add(std::string_view name, int64_t more) {
    put(name, get<int64_t>(name) + more);
  }
  bool is_set(std::string_view name) const {
    return values_[place_of(name)].is_set;
  }
  /// A number, or a flag as one, by its name; NaN if it is a word or none, and
  /// `otherwise` if the sampler has none of this name.
  double number_or(std::string_view name, double otherwise) const;
  /// The place of a name among keys(), the same in all options of a class.
  /// Throws std::out_of_range if there is none.
  size_t place_of(std::string_view name) const;
  /// One of the numbers that operators take; 0 if it is none, or a word.
  double number_at(size_t place) const {
    const c10::IValue& value = values_[place].value;
    if (value.isDouble()) return value.toDouble();
    return value.isInt() ? static_cast<double>(value.toInt()) : 0;
  }

  /// Throws std::invalid_argument if a value is out of range.
  void check() const {
    if (!are_in_range_) check_values();
    are_in_range_ = true;
  }
  /// Throws if what a saved group says of the chain's progress is invalid.
  virtual void check_progress() const {}
  /// Why what is shared must be equal in all groups.
  virtual const char* why_equal() const {
    return "there is one stream of noise for all";
  }
  /// Takes what is not set from others, which must be of the same class.
  void inherit(const SamplerOptions& defaults);
  /// What was set here, is for the whole sampler, and is not as in its options.
  std::vector<std::string> set_for_all(const SamplerOptions& ours) const;
  /// Whether the hyperparameter of this name is equal in all groups.
  virtual bool is_shared(std::string_view /*name*/) const { return false; }
  /// The keys whose values are equal in all groups.
  std::vector<std::string> common_keys() const;
  /// Whether the hyperparameters that groups share are equal.
  bool agrees_with(const SamplerOptions& other) const;
  /// Takes what is equal in all groups from another one.
  void share(const SamplerOptions& other);
  std::unique_ptr<SamplerOptions> copy() const;
  /// Takes what the sampler keeps count of.
  void take_progress(const SamplerOptions& other);
  /// K if parameters hold K chains.
  virtual std::optional<int64_t> chains() const { return std::nullopt; }
  /// K if each of them has a seed of its own, else 0.
  virtual int64_t chains_with_seeds() const { return 0; }
  /// Throws std::invalid_argument if a parameter does not suit these options.
  virtual void check_param(const at::Tensor& param) const;
  /// The keys that write() sets.
  std::vector<std::string> keys() const;
  /// Appends the hyperparameters to a param group of a state dict.
  void write(StateDict& group) const;
  /// Takes the hyperparameters from the state dict's param group `index`.
  void read(const StateDict& group, int64_t index);
  /// Values of nonfinite that the sampler takes.
  virtual std::vector<std::string> nonfinite_choices() const {
    return {"raise", "skip", "allow"};
  }

 protected:
  /// With the defaults of the sampler with this name.
  explicit SamplerOptions(const char* sampler);

  /// See check(), which remembers that there was nothing to say.
  virtual void check_values() const;

  /// Throws if a noise_estimate exceeds the friction, which is `what`, or if
  /// there is one, and no noise.
  void check_noise_estimate(double friction, const char* what) const;

  /// Throws if capturable: of samplers that decide on the host.
  void refuse_capturable() const;

  /// Adds something that the sampler keeps count of, as it begins.
  template <typename T>
  void keep(std::string_view name, const T& begin) {
    values_.push_back({name,
                       nullptr,
                       [](std::string_view own, const c10::IValue& value) {
                         return detail::ToValue(
                             own, detail::FromValue<T>(own, value));
                       },
                       detail::ToValue(name, begin)});
  }

  // Until a sampler has them, which keeps copies itself.
  std::vector<at::Tensor> prior_means_;
  bool means_are_kept_ = false;
  std::optional<bool> capturable_;
  std::optional<std::string> nonfinite_;
  std::optional<int64_t> seed_;
  // Whether they were, as they are now.
  mutable bool are_in_range_ = false;
  // The factor of a noise estimate that was given at another lr, T or N.
  double estimate_scale_ = 1;

 private:
  friend class Sampler;

  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  struct Value {
    std::string_view name;
    const Setting* row = nullptr;  // none of what the sampler keeps count of
    // From a state dict.
    c10::IValue (*read)(std::string_view name,
                        const c10::IValue& value) = nullptr;
    c10::IValue value = {};
    bool is_set = false;
  };

  double number(std::string_view name) const { return number_or(name, kNone); }
  const char* sampler_;
  // In the order of the table, and then what the sampler keeps count of.
  std::vector<Value> values_;
  // Whether a sampler has looked at what they leave open.
  bool is_complete_ = false;
};

/// Options of the sampler Derived::kSampler: setters that can be chained.
template <typename Derived>
class OptionsOf : public SamplerOptions {
 public:
  /// Options of a param group, which takes lr from the sampler.
  OptionsOf() : SamplerOptions(Derived::kSampler) {}
  /// Options with the given step size on SGD's scale.
  explicit OptionsOf(double lr) : OptionsOf() { put("lr", lr); }

  using SamplerOptions::capturable;
  using SamplerOptions::lr;
  using SamplerOptions::nonfinite;
  using SamplerOptions::num_data;
  using SamplerOptions::prior_mean;
  using SamplerOptions::prior_precision;
  using SamplerOptions::seed;
  using SamplerOptions::temperature;

  /// Step size on SGD's scale, >= 0.
  Derived& lr(double value) { return set("lr", value); }
  /// N, the number of training examples, > 0; 1 means that the loss is U
  /// itself. Must be set, here or for the sampler.
  Derived& num_data(double value) { return set("num_data", value); }
  /// λ >= 0, precision of the Gaussian prior N(μ, 1/λ) on each parameter; 0 is
  /// a flat prior. Default: 0.
  Derived& prior_precision(double value) {
    return set("prior_precision", value);
  }
  /// μ, one number for all parameters. Default: 0.
  Derived& prior_mean(double value) {
    prior_means_.clear();
    means_are_kept_ = false;
    return set("prior_mean", value);
  }
  /// μ, a tensor for each of a group's parameters, of its shape. The sampler
  /// takes copies of what they are when it is made, the group is added, or at
  /// the next step; they are then its state. Of several groups each needs its
  /// own.
  Derived& prior_mean(const std::vector<at::Tensor>& values) {
    prior_means_ = values;
    means_are_kept_ = false;
    return set("prior_mean", 0.0);
  }
  /// T >= 0; 1 is the Bayesian posterior, 0 an optimizer without noise.
  /// Default: 1.
  Derived& temperature(double value) { return set("temperature", value); }
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
    are_in_range_ = false;
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

 protected:
  template <typename T>
  Derived& set(std::string_view name, const T& value) {
    put(name, value);
    return self();
  }

 private:
  Derived& self() { return static_cast<Derived&>(*this); }
};

/// Options of a sampler that goes by gradients alone, of which many chains can
/// run at once.
template <typename Derived>
class ManyChainsOf : public OptionsOf<Derived> {
 public:
  using OptionsOf<Derived>::OptionsOf;

  std::optional<int64_t> num_chains() const {
    static const size_t place = this->place_of("num_chains");
    return this->template get_at<std::optional<int64_t>>(place);
  }
  /// K makes K independent chains at once, one for each index of the
  /// parameters' leading dimension, whose loss is the sum of the chains' mean
  /// losses. Chain k is the chain of a sampler with the seed fold_in(seed, k),
  /// bit for bit. For the whole sampler. Default: none, one chain.
  Derived& num_chains(std::optional<int64_t> value) {
    return this->set("num_chains", value);
  }

  std::optional<int64_t> chains() const override { return num_chains(); }
  int64_t chains_with_seeds() const override {
    return num_chains().value_or(0);
  }
  bool is_shared(std::string_view name) const override {
    return name == "num_chains";
  }
};

}  // namespace torch_sgmcmc
