// The base class of all samplers, a torch::optim::Optimizer. A sampler's own
// header has its equations (see sgld.h).
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

/// A parameter's state: tensors of its shape by name (see the sampler's class),
/// in fp64 for fp64 parameters, else in fp32. For parameters in bf16 or fp16,
/// "master" is θ and the parameter is θ rounded (not with SBPS).
class TORCH_SGMCMC_API SamplerParamState
    : public torch::optim::OptimizerParamState {
 public:
  /// The tensor of this name; undefined if there is none.
  at::Tensor& operator[](std::string_view name);
  const at::Tensor& operator[](std::string_view name) const;
  /// All tensors, of which some may be undefined.
  const std::list<std::pair<std::string, at::Tensor>>& tensors() const {
    return tensors_;
  }
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<SamplerParamState>(*this);
  }

  /// Number of gradients in SGHMC's online noise estimate.
  std::optional<int64_t> num_grads;

 private:
  // A list, so that references stay valid.
  std::list<std::pair<std::string, at::Tensor>> tensors_;
};

class SamplerImpl;

/// Base class of the samplers.
///
/// Errors: std::invalid_argument for invalid options, parameters and state
/// dicts; std::runtime_error for what a step finds (gradients, losses, state,
/// changed parameters), rarely c10::Error from an operator; std::logic_error
/// for an object that was moved from. A call that throws has changed no
/// parameter, state or counter (but SGHMC's online noise estimate keeps the
/// gradients of a refused step).
///
/// Threads: one thread at a time uses an object and its parameters. Samplers of
/// different parameters may step in different threads, with the same chains.
///
/// lr, temperature and num_data may change between steps: momenta and noise
/// estimates are rescaled. Groups with lr 0 do not move; a step in which all
/// have lr 0 is not counted. More: docs/changing_settings.md.
///
/// Parameters that require a gradient are sampled. A step skips a parameter
/// without a gradient, as torch does. A parameter with a gradient in some steps
/// only has another target.
///
/// Gradients that are not finite never reach parameters, state, noise or step
/// counter. nonfinite("raise"), the default, throws std::runtime_error with the
/// parameter's place, on a GPU at the next step (with capturable the step is
/// skipped). "skip" skips the step and counts it in num_skipped(). "ignore"
/// makes no check. Clipped gradients and skipped steps change the target
/// density. More: docs/samplers/sampler.md.
class TORCH_SGMCMC_API Sampler : public torch::optim::Optimizer {
 public:
  /// Makes one update of all parameters that have a gradient. The closure
  /// computes the loss, calls backward() and returns the loss; it is called
  /// once, before the update (EWSG and SBPS differ).
  // NOLINTNEXTLINE(google-default-arguments): as torch's own.
  torch::Tensor step(LossClosure closure = nullptr) final;

  /// Adds a param group. Options that it does not set are the sampler's.
  ///
  /// torch's own add_param_group, called through a reference to
  /// torch::optim::Optimizer, drops the group's options: step() then throws.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// The seed that keys all noise of this sampler.
  int64_t seed() const;
  /// The number of updates, without skipped steps. Waits for a GPU.
  int64_t num_steps() const;
  /// The number of steps skipped because gradients were not finite.
  int64_t num_skipped() const;

  /// Returns the state dict, as in Python: a snapshot, which later steps do not
  /// change.
  StateDict state_dict() const;
  /// Loads a state dict from Python or C++; the chain continues bitwise
  /// identically. Throws std::invalid_argument, and loads nothing, if it is of
  /// another class or other parameters, or has a value out of range.
  void load_state_dict(const StateDict& dict);

  /// A parameter's state; empty without any.
  const SamplerParamState& state_of(const at::Tensor& param) const;
  /// The same, mutable; created if missing.
  SamplerParamState& own_state_of(const at::Tensor& param);

  // For torch::save and torch::load.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  Sampler(const Sampler&) = delete;
  Sampler(Sampler&&) noexcept;
  Sampler& operator=(const Sampler&) = delete;
  Sampler& operator=(Sampler&&) noexcept;
  ~Sampler() override;

 protected:
  /// Throws std::logic_error if the sampler was moved from.
  SamplerImpl& impl() const;
  /// Throws std::out_of_range.
  torch::optim::OptimizerParamGroup& group_at(size_t group);

 private:
  template <typename Options>
  friend class SamplerOf;
  friend struct SamplerAccess;
  Sampler(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
          std::unique_ptr<SamplerOptions> defaults);

  std::shared_ptr<SamplerImpl> impl_;
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

  /// The options of a group, which may be changed or replaced between steps.
  /// Options that are not set are the sampler's. Throws std::out_of_range, or
  /// std::invalid_argument for options of another class.
  Options& options(size_t group = 0) {
    auto* own = dynamic_cast<Options*>(&group_at(group).options());
    if (own != nullptr) return *own;
    throw std::invalid_argument("Invalid options: those of group " +
                                std::to_string(group) + " are not of class " +
                                Options::kSampler + "Options");
  }
};

/// True if this build has CUDA kernels.
TORCH_SGMCMC_API bool has_cuda();

}  // namespace torch_sgmcmc
