// What all samplers share: a torch::optim::Optimizer that keeps track of its
// noise. Param groups, seeds and noise offsets, missing gradients, closures and
// state dicts are here; a sampler adds its update (see sgld.h).
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <initializer_list>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch_sgmcmc/count.h"
#include "torch_sgmcmc/export.h"
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
  bool is_empty() const;

  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<SamplerParamState>(*this);
  }

  /// How many gradients SGHMC's online noise estimate has seen, if any.
  std::optional<int64_t> num_grads;

 private:
  // A list: references last.
  std::list<std::pair<std::string, at::Tensor>> tensors_;
};

/// The parameters of one group on one device that have a gradient, what the
/// sampler remembers of them, and the lists that its operator takes besides.
struct Work {
  SamplerOptions* options = nullptr;
  int64_t seed = 0;
  Count step;  // the number of updates made before
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<int64_t> offsets;
  /// The means of their priors; empty if they are options->prior_mean().
  std::vector<at::Tensor> prior_means;
  /// Of those of params that are in bf16 or fp16.
  std::vector<at::Tensor> masters;
  std::vector<std::vector<at::Tensor>> state;
  // Where the device decides whether to make the update: an int64 scalar in
  // place of the step, negative if it does not. Undefined elsewhere.
  at::Tensor gate;
  // Numbers of operators: what momenta and thermostats of other settings are
  // multiplied by, and the noise estimate for the present ones.
  double momentum_scale = 1;
  double thermostat_scale = 1;
  double noise_estimate = 0;
};

class Method;
enum class Start;
struct Scales;

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
/// has none in a step is left out of it, as by torch's optimizers; one that has
/// a gradient in some steps only has another target, which is warned of, once.
///
/// Gradients that are not finite reach neither parameters nor state, noise and
/// step counter: nonfinite("raise"), the default, throws std::runtime_error,
/// which names the parameter (on a GPU at the next step; with capturable it
/// does not, and the step is left out), "skip" leaves the step out and counts
/// it in num_skipped(), "allow" does not look. Clipping gradients changes the
/// target density, and so does leaving out steps. More:
/// docs/samplers/sampler.md.
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
  virtual void add_param_group(
      const torch::optim::OptimizerParamGroup& param_group);

  /// The seed that keys all noise of this sampler.
  int64_t seed() const;

  /// The number of updates made; steps that were left out are none. On a GPU it
  /// waits for the last one.
  int64_t num_steps() const;

  /// The number of steps that were left out, their gradients not being finite.
  int64_t num_skipped() const;

  /// Says which distribution is sampled: data scale, prior, temperature.
  std::string target_summary() const;

  /// What Python's state_dict() of the same sampler returns. Tensors are shared
  /// with the sampler, not copied: save them before the next step.
  StateDict state_dict() const;

  /// Continues the chain of a state dict bit for bit, from Python or from C++.
  /// Throws std::invalid_argument, and loads nothing, if it is of another kind
  /// of optimizer or of other parameters, or has a value out of range.
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
  Sampler(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
          std::unique_ptr<SamplerOptions> defaults);

  /// The operator whose row (csrc/core/row.h) says how state begins and what
  /// makes an update, null if code does.
  virtual const char* method() const { return nullptr; }

  /// Initialises state and makes the checks that need it; fills work.state and
  /// work.masters. Called for all groups before the first update.
  virtual void prepare(Work& work);

  /// Calls prepare() for all lists; for what concerns them together.
  virtual void prepare_all(std::vector<Work>& work);

  /// Makes one update of work.params, which are on one device.
  virtual void update(const Work& work);

  /// A number of an operator that is not the group's hyperparameter.
  using Instead = std::pair<std::string_view, double>;

  /// Makes the update of an operator with a row, with the group's
  /// hyperparameters but for those given instead.
  void update_by(const char* op,
                 const Work& work,
                 std::initializer_list<Instead> instead = {});

  /// The names of what is remembered of a parameter, in the order of a state
  /// dict.
  virtual std::vector<std::string> state_keys() const;

  /// Throws std::invalid_argument if the saved state of the parameter number
  /// `index` is not as no row can say that it must be.
  virtual void check_saved_state(const SamplerParamState& /*state*/,
                                 int64_t /*index*/) const {}

  /// Throws unless all groups are known, have values in their ranges, and
  /// agree on what they share.
  void check_groups() const;

  /// Throws if a group was added in a way that passes this class by.
  void check_known(size_t group) const;

  std::vector<at::Tensor> all_params() const;

  /// Comes first in a step. Throws unless the parameters are those whose noise
  /// is numbered, and options are as they may be.
  void begin_step();

  /// Checks groups and gradients and lists what there is to update.
  std::vector<Work> gather();

  /// Throws if an operator would refuse parameters, gradients or state.
  void check_fit(const std::vector<Work>& work) const;

  /// Called when parameters or their states may have been exchanged for others.
  virtual void parameters_changed() {}

  /// Looks at the gradients, which comes first in a step. Throws (and with
  /// "skip" something that step() catches) if one is not finite.
  void check_finite(const std::vector<Work>& work);

  /// Looks at what else enters an update: for each of `work`, a tensor for each
  /// parameter, or none.
  void check_finite(const std::vector<Work>& work,
                    const std::vector<std::vector<at::Tensor>>& tensors,
                    const char* what);

  /// Whether the host waits until the next step to see what was found.
  virtual bool looks_later(const std::vector<Work>& work) const;

  /// Counts a step that was left out.
  void leave_out();

  /// "raise", "skip" or "allow", for all groups.
  std::string nonfinite() const;

  /// Whether lr is 0 in all groups: a step then does nothing.
  bool rests() const;

  /// How momenta begin.
  virtual Start start_of_momenta(const SamplerOptions& options) const;

  /// Makes the update of everything listed and counts the step.
  void advance(const std::vector<Work>& work);

  /// Fills work.masters, with new ones of parameters that have none yet.
  void start_masters(Work& work);

  /// The mean of a parameter's prior, undefined if that is its group's number.
  at::Tensor prior_mean_of(const at::Tensor& param) const;

  const char* name() const;
  SamplerOptions& options_of(size_t group);
  const SamplerOptions& options_of(size_t group) const;

  /// Options of which only what the sampler counts means anything.
  SamplerOptions& progress_of() const;

  /// For each parameter of a group the index of its first element in the noise
  /// stream.
  const std::vector<int64_t>& offsets_of(size_t group) const;

 private:
  friend class Collector;
  friend class GammaPrecision;
  friend class SamplerRef;

  void collect(size_t group, std::vector<Work>& work);
  struct Ledger;  // libtorch/core/ledger.h
  Ledger& ledger() const;
  void read_group(const StateDict& group,
                  int64_t index,
                  const std::vector<at::Tensor>& params,
                  SamplerOptions& options,
                  Ledger& own) const;
  std::unique_ptr<SamplerParamState> read_state(
      const StateDict& kept,
      const std::vector<std::string>& keys,
      const at::Tensor& param,
      int64_t index) const;
  void read_means(const StateDict& state,
                  int64_t group,
                  const std::vector<at::Tensor>& params,
                  const std::vector<int64_t>& indices,
                  std::unordered_map<const void*, at::Tensor>& means) const;
  static void check_shared(
      const std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>&
          options,
      const Ledger& own,
      const c10::IValue& saved);
  static void check_saved(const Ledger& saved);
  void check_fit(const Work& work, size_t index) const;
  const Method& method_of(const char* op, const SamplerOptions& options);
  void check_numbers();
  void follow_groups();
  void complete(size_t group);
  void complete_means(size_t group, SamplerOptions& options);
  void complete_all() const;
  void leave() noexcept;
  bool has_moved(const std::vector<Work>& work) const;
  void look_for_absences(const std::vector<Work>& work);
  int64_t steps_counted() const;
  void set_gate(std::vector<Work>& work);
  bool leaves_momenta(const std::vector<Work>& work) const;
  void redraw_momenta();
  void multiply_state(size_t group,
                      const Scales& scales,
                      const std::vector<Work>& updated);
  void finish_rescaling(const std::vector<Work>& work);
  void rescale_now(std::vector<Work>& work);
  void catch_up();
  void throw_what_was_found();

  // What was seen of gradients (libtorch/core/nonfinite.h).
  struct Watch;
  std::unique_ptr<Watch> watch_;
  // What was given as tensors, of parameters by their TensorImpl.
  std::unordered_map<const void*, at::Tensor> prior_means_;
  std::unique_ptr<Ledger> ledger_;
  // Where it is, for those that refer to it.
  std::shared_ptr<Sampler*> place_;
};

/// Refers to a sampler, and follows it when it is moved.
class TORCH_SGMCMC_API SamplerRef {
 public:
  explicit SamplerRef(Sampler& sampler) : place_(sampler.place_) {}

  /// The sampler; throws std::logic_error if there is none any more.
  Sampler& get() const;
  /// Or null then.
  Sampler* find() const { return *place_; }

 private:
  std::shared_ptr<Sampler*> place_;
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
  Options& options(size_t group = 0) {
    return dynamic_cast<Options&>(param_groups().at(group).options());
  }

 protected:
  /// The options of a group, for looking only.
  const Options& options_at(size_t group) const {
    return static_cast<const Options&>(options_of(group));
  }
  const Options& first() const { return options_at(0); }

  /// What the sampler counts.
  Options& progress() { return static_cast<Options&>(progress_of()); }
  const Options& progress() const {
    return static_cast<const Options&>(progress_of());
  }

  template <typename Change>
  void for_each_group(Change change) {
    for (size_t group = 0; group < param_groups_.size(); ++group) {
      change(options(group));
    }
  }
};

}  // namespace torch_sgmcmc
