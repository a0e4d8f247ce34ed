// What all samplers share: a torch::optim::Optimizer that keeps track of its
// noise. Param groups, seeds and noise offsets, missing gradients, closures and
// state dicts are here; a sampler adds its update (see sgld.h).
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_sgmcmc/export.h"
#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

namespace detail {

// What ParamStateOf does with one tensor or one counter.
inline bool IsPresent(const at::Tensor& value) { return value.defined(); }
inline bool IsPresent(int64_t value) { return value != 0; }
TORCH_SGMCMC_API void FromState(const StateDict& dict,
                                const char* name,
                                c10::Device device,
                                at::Tensor& result);
TORCH_SGMCMC_API void FromState(const StateDict& dict,
                                const char* name,
                                c10::Device device,
                                int64_t& result);
TORCH_SGMCMC_API void CheckShape(const char* name,
                                 const at::Tensor& value,
                                 const at::Tensor& param,
                                 const char* sampler);
inline void CheckShape(const char*, int64_t, const at::Tensor&, const char*) {}

}  // namespace detail

/// What a sampler remembers of one parameter.
class TORCH_SGMCMC_API SamplerParamState
    : public torch::optim::OptimizerParamState {
 public:
  virtual StateDict to_dict() const = 0;
  /// Takes tensors to the device, in the precision that they were saved in.
  virtual void from_dict(const StateDict& dict, c10::Device device) = 0;
  /// Throws std::runtime_error unless all tensors have the parameter's shape.
  virtual void check_shape(const at::Tensor& param,
                           const char* sampler) const = 0;
};

/// The state of the sampler that Derived belongs to: tensors and counters,
/// which are left out of a state dict while they are undefined or 0.
template <typename Derived>
class ParamStateOf : public SamplerParamState {
 public:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }

  StateDict to_dict() const override {
    StateDict dict;
    const auto& from = static_cast<const Derived&>(*this);
    for_each([&](const char* name, auto member) {
      if (detail::IsPresent(from.*member)) dict.set(name, from.*member);
    });
    return dict;
  }

  void from_dict(const StateDict& dict, c10::Device device) override {
    for_each([&](const char* name, auto member) {
      detail::FromState(
          dict, name, device, static_cast<Derived&>(*this).*member);
    });
  }

  void check_shape(const at::Tensor& param,
                   const char* sampler) const override {
    const auto& from = static_cast<const Derived&>(*this);
    for_each([&](const char* name, auto member) {
      detail::CheckShape(name, from.*member, param, sampler);
    });
  }

 private:
  template <typename Visit>
  static void for_each(Visit visit) {
    std::apply(
        [&](const auto&... field) { (visit(field.first, field.second), ...); },
        Derived::fields());
  }
};

/// The parameters of one group on one device that have a gradient, what the
/// sampler remembers of them, and the lists that its operator takes besides.
struct Work {
  SamplerOptions* options = nullptr;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<int64_t> offsets;
  std::vector<std::vector<at::Tensor>> state;
};

/// Base class of the samplers.
///
/// Errors: std::invalid_argument where Python has a ValueError,
/// std::runtime_error (or c10::Error, from an operator) where it has a
/// RuntimeError, with the same messages. A step that throws has changed no
/// parameter.
class TORCH_SGMCMC_API Sampler : public torch::optim::Optimizer {
 public:
  /// Makes one update of all parameters that have a gradient.
  ///
  /// The closure, if there is one, computes the loss, calls backward() and
  /// returns the loss; it is called once, before the update.
  // NOLINTNEXTLINE(google-default-arguments): as torch's own.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// Adds a param group; its noise follows that of the existing groups. What
  /// its options leave open is taken from the sampler's.
  ///
  /// torch's own add_param_group is not virtual, and through a reference to
  /// torch::optim::Optimizer it would drop the group's options: step() refuses
  /// a group that was added so.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// The seed that keys all noise of this sampler.
  int64_t seed() const;

  /// Says which distribution is sampled: data scale, prior, temperature.
  std::string target_summary() const;

  /// What Python's state_dict() of the same sampler returns. Tensors are shared
  /// with the sampler, not copied: save them before the next step.
  StateDict state_dict() const;

  /// Continues the chain of a state dict bit for bit, from Python or from C++.
  /// Throws std::invalid_argument, and loads nothing, if it is of another kind
  /// of optimizer or of other parameters.
  void load_state_dict(const StateDict& dict);

  // For torch::save and torch::load.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  Sampler(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
          std::unique_ptr<SamplerOptions> defaults);

  /// Initialises state and makes the checks that need it; fills work.state.
  /// Called for all groups before the first update.
  virtual void prepare(Work& work);

  /// Calls prepare() for all lists; for what concerns them together.
  virtual void prepare_all(std::vector<Work>& work);

  /// Makes one update of work.params, which are on one device.
  virtual void update(const Work& work) = 0;

  /// A parameter's state before its first update.
  virtual std::unique_ptr<SamplerParamState> new_state() const;

  /// Adds what the sampler remembers beside its parameters' states, under keys
  /// of strings, to the state of a state dict.
  virtual void write_common(StateDict& state) const;

  /// Reads and checks that; returns what puts it in place and cannot fail.
  virtual std::function<void()> read_common(const StateDict& state);

  /// Throws if a group was added in a way that passes this class by.
  void check_known(size_t group) const;

  /// Checks groups and gradients and lists what there is to update.
  std::vector<Work> gather();

  /// Makes the update of everything listed and counts the step.
  void advance(const std::vector<Work>& work);

  /// The state of a parameter, which is created if there is none.
  SamplerParamState& state_of(const at::Tensor& param);

  const char* name() const;
  SamplerOptions& options_of(size_t group);
  const SamplerOptions& options_of(size_t group) const;

 private:
  void collect(size_t group, std::vector<Work>& work);
  void check_fit(const at::Tensor& param, const at::Tensor& grad) const;
  int64_t num_steps() const;
};

/// A sampler with options of the class Options: constructors and typed access.
template <typename Options>
class SamplerOf : public Sampler {
 public:
  /// Samples the parameters, in one param group.
  SamplerOf(std::vector<at::Tensor> params, const Options& defaults)
      : SamplerOf(
            std::vector<torch::optim::OptimizerParamGroup>{
                torch::optim::OptimizerParamGroup(std::move(params))},
            defaults) {}

  /// Samples the parameters of several groups.
  SamplerOf(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
            const Options& defaults)
      : Sampler(param_groups, std::make_unique<Options>(defaults)) {}

  /// The options of a group, which may be changed between steps.
  Options& options(size_t group = 0) {
    return static_cast<Options&>(param_groups().at(group).options());
  }
};

}  // namespace torch_sgmcmc
