// Hyperparameters of a param group.
//
// A hyperparameter that a param group does not set is the sampler's, and one
// that the sampler does not set has the library's default:
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

/// The common part of all samplers' options.
// Moving copies: options are never empty.
// NOLINTNEXTLINE(cppcoreguidelines-special-member-functions)
class TORCH_SGMCMC_API SamplerOptions : public torch::optim::OptimizerOptions {
 public:
  double lr() const { return number("lr"); }
  double num_data() const { return number("num_data"); }
  double prior_precision() const { return number("prior_precision"); }
  double prior_mean() const { return number("prior_mean"); }
  double temperature() const { return number("temperature"); }
  bool capturable() const { return value("capturable").toBool(); }
  std::string nonfinite() const { return value("nonfinite").toStringRef(); }
  /// The seed for a new sampler; afterwards Sampler::seed() has it.
  std::optional<int64_t> seed() const;

  // For groups of any sampler; torch's learning-rate schedulers use the first
  // two.
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { put("lr", value); }
  void set_prior_precision(double value) { put("prior_precision", value); }
  void set_temperature(double value) { put("temperature", value); }

  SamplerOptions(const SamplerOptions& other);
  SamplerOptions& operator=(const SamplerOptions& other);
  ~SamplerOptions() override;

 protected:
  /// The defaults of the sampler with this name.
  explicit SamplerOptions(const char* sampler);

  /// A hyperparameter by name. csrc/host/settings.cpp has defaults and ranges.
  c10::IValue value(std::string_view name) const;
  /// A number; NaN if the sampler has none of this name.
  double number(std::string_view name) const;
  void put(std::string_view name, const c10::IValue& value);
  void put_prior_means(const std::vector<at::Tensor>& values);
  void put_seed(int64_t value);

 private:
  friend struct OptionAccess;
  std::unique_ptr<OptionValues> values_;
};

/// Options of the sampler Derived::kSampler: setters that can be chained.
template <typename Derived>
class OptionsOf : public SamplerOptions {
 public:
  /// Options of a param group with the sampler's lr.
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
  /// N > 0, the number of training examples; 1 if the loss is U itself. Must be
  /// set here or for the sampler.
  Derived& num_data(double value) { return set("num_data", value); }
  /// λ >= 0 of the prior N(μ, 1/λ) on each parameter; 0 is flat. Default: 0.
  Derived& prior_precision(double value) {
    return set("prior_precision", value);
  }
  /// μ, one number for all parameters. Default: 0.
  Derived& prior_mean(double value) {
    put_prior_means({});
    return set("prior_mean", value);
  }
  /// μ, a tensor of its shape for each parameter of the group. The sampler
  /// copies them when it is made, when the group is added, or at the next step.
  /// Each group needs its own.
  Derived& prior_mean(const std::vector<at::Tensor>& values) {
    put_prior_means(values);
    return set("prior_mean", 0.0);
  }
  /// T >= 0; 1 is the Bayesian posterior, 0 an optimizer without noise.
  /// Default: 1.
  Derived& temperature(double value) { return set("temperature", value); }
  /// Key of the noise, set before the sampler is made. Default: drawn from
  /// torch's default generator. Give each sampler its own, see seeds.h.
  Derived& seed(int64_t value) {
    put_seed(value);
    return self();
  }
  /// Keep the step counter in device memory, so that step() can be captured in
  /// a CUDA graph. Set before the sampler is made. Default: false.
  Derived& capturable(bool value) { return set("capturable", value); }
  /// Policy for gradients that are not finite: "raise", "skip" or "ignore" (see
  /// Sampler), equal in all groups. Default: "raise".
  Derived& nonfinite(const std::string& value) {
    return set("nonfinite", value);
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

/// Options of a gradient-only sampler, which can run many chains at once.
template <typename Derived>
class ManyChainsOf : public OptionsOf<Derived> {
 public:
  using OptionsOf<Derived>::OptionsOf;

  std::optional<int64_t> num_chains() const {
    return this->value("num_chains").template to<std::optional<int64_t>>();
  }
  /// K runs K independent chains, one for each index of the parameters' leading
  /// dimension; the loss is the sum of the chains' mean losses. Chain k is
  /// bitwise that of a sampler with the seed fold_in(seed, k). Equal in all
  /// groups. Default: none, one chain.
  Derived& num_chains(std::optional<int64_t> value) {
    return this->set("num_chains", value);
  }
};

// Getter and chained setter of a hyperparameter, as torch's TORCH_ARG.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define TORCH_SGMCMC_ARG(T, name)                 \
  T name() const { return value(#name).to<T>(); } \
  auto name(const T& value)->decltype(*this) {    \
    put(#name, value);                            \
    return *this;                                 \
  }
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace torch_sgmcmc
