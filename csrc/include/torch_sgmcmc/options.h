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
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_sgmcmc/export.h"

namespace torch_sgmcmc {

class OptionValues;

/// What the options of all samplers have in common.
// Moving copies: options are never empty.
// NOLINTNEXTLINE(cppcoreguidelines-special-member-functions)
class TORCH_SGMCMC_API SamplerOptions : public torch::optim::OptimizerOptions {
 public:
  double lr() const { return number("lr"); }
  double num_data() const { return number("num_data"); }
  double prior_precision() const { return number("prior_precision"); }
  double prior_mean() const { return number("prior_mean"); }
  double temperature() const { return number("temperature"); }
  bool capturable() const;
  std::string nonfinite() const;
  /// As set for a sampler to be, which then has it (Sampler::seed()).
  std::optional<int64_t> seed() const;

  // For whoever holds a group of any sampler; torch's learning-rate schedulers
  // use the first two.
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { put("lr", value); }
  void set_prior_precision(double value) { put("prior_precision", value); }
  void set_temperature(double value) { put("temperature", value); }

  SamplerOptions(const SamplerOptions& other);
  SamplerOptions& operator=(const SamplerOptions& other);
  ~SamplerOptions() override;

 protected:
  /// With the defaults of the sampler with this name.
  explicit SamplerOptions(const char* sampler);

  /// A hyperparameter by its name. Its default and range are in the table of
  /// all hyperparameters (csrc/host/settings.cpp).
  c10::IValue value(std::string_view name) const;
  /// A number; NaN if the sampler has none of this name.
  double number(std::string_view name) const;
  void put(std::string_view name, const c10::IValue& value);
  void put_prior_means(const std::vector<at::Tensor>& values);
  void put_seed(int64_t value);
  void put_capturable(bool value);
  void put_nonfinite(const std::string& value);

 private:
  friend struct OptionAccess;
  std::unique_ptr<OptionValues> values_;
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
    put_prior_means({});
    return set("prior_mean", value);
  }
  /// μ, a tensor for each of a group's parameters, of its shape. The sampler
  /// takes copies of what they are when it is made, the group is added, or at
  /// the next step; they are then its state. Of several groups each needs its
  /// own.
  Derived& prior_mean(const std::vector<at::Tensor>& values) {
    put_prior_means(values);
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
    put_seed(value);
    return self();
  }
  /// Keep the step counter in device memory, so that step() can be captured in
  /// a CUDA graph: every replay then injects fresh noise. For a sampler to be.
  /// Default: false.
  Derived& capturable(bool value) {
    put_capturable(value);
    return self();
  }
  /// What to do about gradients that are not finite: "raise", "skip" or
  /// "ignore" (see Sampler, also on clipping). For the whole sampler. Default:
  /// "raise".
  Derived& nonfinite(const std::string& value) {
    put_nonfinite(value);
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
    return this->value("num_chains").template to<std::optional<int64_t>>();
  }
  /// K makes K independent chains at once, one for each index of the
  /// parameters' leading dimension, whose loss is the sum of the chains' mean
  /// losses. Chain k is the chain of a sampler with the seed fold_in(seed, k),
  /// bit for bit. For the whole sampler. Default: none, one chain.
  Derived& num_chains(std::optional<int64_t> value) {
    return this->set("num_chains", value);
  }
};

// A hyperparameter of a class of options, as torch's TORCH_ARG: read by its
// name, and set by it in a chain.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define TORCH_SGMCMC_ARG(T, name)                 \
  T name() const { return value(#name).to<T>(); } \
  auto name(const T& value)->decltype(*this) {    \
    put(#name, value);                            \
    return *this;                                 \
  }
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace torch_sgmcmc
