// What all samplers share: a torch::optim::Optimizer that keeps track of its
// noise. Param groups, seeds and noise offsets, missing gradients, closures and
// state dicts are here; a sampler's own header says how it moves (see sgld.h).
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

/// What a sampler remembers of one parameter: tensors of its shape by their
/// names, as its class documents them, in fp64 for fp64 parameters and in fp32
/// for all others. With every sampler but SBPS, of a parameter in bf16 or fp16
/// "master" is θ, of which the parameter is the rounded value.
class TORCH_SGMCMC_API SamplerParamState
    : public torch::optim::OptimizerParamState {
 public:
  /// The tensor of this name, undefined while there is none.
  at::Tensor& operator[](std::string_view name);
  const at::Tensor& operator[](std::string_view name) const;
  /// All that were asked for to be changed, some of which may be undefined.
  const std::list<std::pair<std::string, at::Tensor>>& tensors() const {
    return tensors_;
  }
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<SamplerParamState>(*this);
  }

  /// How many gradients SGHMC's online noise estimate has seen, if any.
  std::optional<int64_t> num_grads;

 private:
  // A list: references last.
  std::list<std::pair<std::string, at::Tensor>> tensors_;
};

class SamplerImpl;

/// Base class of the samplers.
///
/// Errors: std::invalid_argument if what was given (an option, a parameter, a
/// state dict) is not as it should be; std::runtime_error if what a step finds
/// (a gradient, a closure's loss, state, parameters that have changed) is not,
/// or, rarely, c10::Error, from an operator; std::logic_error if the object may
/// not be used so, as after it was moved from. All name what was expected and
/// what there is. A call that throws has changed no parameter, no state and no
/// counter. (SGHMC's online noise estimate keeps gradients that it objects to.)
///
/// Threads: an object is for one thread at a time, as are its parameters.
/// Different samplers, of different parameters, may step in different threads;
/// their chains do not depend on it.
///
/// lr, temperature and num_data may change between steps: momenta and noise
/// estimates follow. At lr 0 nothing moves, and a step in which all groups have
/// it is not counted. More: docs/changing_settings.md.
///
/// What is sampled are the parameters that require a gradient. A parameter that
/// has none in a step is skipped, as by torch's optimizers; one that has
/// a gradient in some steps only has another target.
///
/// Gradients that are not finite reach neither parameters nor state, noise and
/// step counter: nonfinite("raise"), the default, throws std::runtime_error,
/// which names the parameter (on a GPU at the next step; with capturable it
/// does not, and the step is skipped), "skip" leaves the step out and counts
/// it in num_skipped(), "ignore" does not check. Clipping gradients changes the
/// target density, and so does leaving out steps. More:
/// docs/samplers/sampler.md.
class TORCH_SGMCMC_API Sampler : public torch::optim::Optimizer {
 public:
  /// Makes one update of all parameters that have a gradient. The closure, if
  /// there is one, computes the loss, calls backward() and returns the loss; it
  /// is called once, before the update. (EWSG and SBPS need another one.)
  // NOLINTNEXTLINE(google-default-arguments): as torch's own.
  torch::Tensor step(LossClosure closure = nullptr) final;

  /// Adds a param group; its noise follows the existing groups'. What
  /// its options leave open is taken from the sampler's.
  ///
  /// torch's own add_param_group is not virtual, and through a reference to
  /// torch::optim::Optimizer it would drop the group's options: step() refuses
  /// a group that was added so.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// The seed that keys all noise of this sampler.
  int64_t seed() const;
  /// The number of updates made; skipped steps are none. On a GPU it waits for
  /// the last one.
  int64_t num_steps() const;
  /// The number of skipped steps, whose gradients were not finite.
  int64_t num_skipped() const;

  /// What Python's state_dict() of the same sampler returns. Tensors of
  /// parameters are shared with the sampler: save them before the next step.
  StateDict state_dict() const;
  /// Continues the chain of a state dict bit for bit, from Python or from C++.
  /// Throws std::invalid_argument, and loads nothing, if it is of another class
  /// or of other parameters, or has a value out of range.
  void load_state_dict(const StateDict& dict);

  /// What is remembered of a parameter; empty if that is nothing.
  const SamplerParamState& state_of(const at::Tensor& param) const;
  /// The same to be changed; begun, if there was none.
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

  /// The options of a group, which may be changed or exchanged between steps.
  /// What new ones leave open is taken from the sampler's. Seed, counters and
  /// what else the sampler keeps are none of them.
  /// Throws std::out_of_range if there is no such group.
  Options& options(size_t group = 0) {
    return dynamic_cast<Options&>(group_at(group).options());
  }
};

/// True if this build has CUDA kernels.
TORCH_SGMCMC_API bool has_cuda();

}  // namespace torch_sgmcmc
