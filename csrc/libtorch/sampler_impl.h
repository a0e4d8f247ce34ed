// The implementation of a sampler: its data, and the parts of a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/rescaling.h"
#include "libtorch/options.h"
#include "libtorch/tensor_lists.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

// Thrown inside of step() to skip the step.
struct StepSkipped {};

// Values of a closure are not finite. A skipped step returns the losses.
class NonfiniteError : public std::runtime_error {
 public:
  explicit NonfiniteError(const std::string& message, at::Tensor losses = {})
      : std::runtime_error(message), losses_(std::move(losses)) {}

  const at::Tensor& losses() const { return losses_; }

 private:
  at::Tensor losses_;
};

// The lr, T and N of a param group's state: Note [Rescaled momenta],
// torch_sgmcmc/core/state.py.
struct GroupRecords {
  struct Estimate {
    double value = 0;
    MomentumSettings settings;
  };

  // None without momenta, or without a number.
  std::optional<MomentumSettings> momenta;
  std::optional<Estimate> estimate;
};

// Factors for a step with momenta of other settings.
struct Scales {
  double momentum = 1;
  double thermostat = 1;
};
Scales ScalesOf(const GroupRecords& records, const OptionValues& options,
                const Tensors& params);
// Records the settings of a new noise estimate; returns its factor for these
// options.
double FollowEstimate(GroupRecords& records, const OptionValues& options);

// To and from a param group of a state dict. Reading throws
// std::invalid_argument for an impossible record.
void WriteRecords(const GroupRecords& records, const OptionValues& options,
                  const char* op, StateDict& group);
GroupRecords ReadRecords(const StateDict& group, const OptionValues& options,
                         const char* op);
// The keys of the records of a sampler with these options and this operator.
std::vector<std::string> RecordKeys(const OptionValues& options,
                                    const char* op);

// A sampler's data of one param group.
struct GroupState {
  std::vector<const void*> params;  // TensorImpl, which identify the group
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  Count step;
  Count num_skipped;
  // True if prior means are tensors.
  bool has_means = false;
  GroupRecords records;

  // Numbers all parameters from `begin` on; returns the next free number.
  int64_t number(const Tensors& all, int64_t num_chains, int64_t begin);
  // Counters on the device of these parameters, if capturable.
  void set_counters(int64_t steps, int64_t skipped, bool capturable,
                    const Tensors& all);
};

// Seed, counters and noise offsets.
struct ChainState {
  std::vector<GroupState> groups;
  int64_t next_offset = 0;
  int64_t seed = 0;
  bool capturable = false;
  // Chains with a seed each, or 0.
  int64_t num_chains = 0;
};

// A device's counts of NaNs and infinities in gradients.
struct FiniteCheck {
  Tensors params;
  at::Tensor counts;
};

// The finite check of gradients (torch_sgmcmc/core/finite_check.py).
struct DeferredFiniteCheck {
  // Checks of this step.
  std::vector<FiniteCheck> asked;
  // Unread checks of the last step, and its policy.
  std::vector<FiniteCheck> pending;
  std::string choice;
  std::optional<c10::Event> event;
  // Former records of momenta, by group.
  std::vector<std::pair<size_t, std::optional<MomentumSettings>>> undo;
  // The last step's error, if any.
  std::string error;
};

class SamplerImpl {
 public:
  // `op` is the operator whose spec (csrc/ops/op_spec.h) defines state and
  // update; null if code does.
  explicit SamplerImpl(const char* op) : op_(op) {}
  virtual ~SamplerImpl() = default;
  SamplerImpl(const SamplerImpl&) = delete;
  SamplerImpl(SamplerImpl&&) = delete;
  SamplerImpl& operator=(const SamplerImpl&) = delete;
  SamplerImpl& operator=(SamplerImpl&&) = delete;

  void set_owner(Sampler* owner) { owner_ = owner; }
  Sampler& owner() const { return *owner_; }

  // Takes its defaults and first groups.
  void construct(const std::vector<ParamGroup>& groups);

  // See Sampler.
  virtual torch::Tensor step(const LossClosure& closure);
  void add_param_group(const ParamGroup& param_group);
  int64_t seed() const { return chain_.seed; }
  int64_t num_steps() const;
  int64_t num_skipped() const;
  StateDict state_dict() const;
  void load_state_dict(const StateDict& dict);
  const SamplerParamState& state_of(const at::Tensor& param) const;
  SamplerParamState& own_state_of(const at::Tensor& param);

  const char* name() const { return defaults().sampler(); }
  std::vector<ParamGroup>& groups() const { return owner_->param_groups(); }
  OptionValues& options_of(size_t group) const {
    return OptionAccess::Of(groups()[group].options());
  }
  // A parameter's prior mean; undefined if it is the group's number.
  at::Tensor prior_mean_of(const at::Tensor& param) const;
  // The number of steps, without waiting for a device's last one.
  int64_t steps_counted() const;
  Tensors all_params() const;
  // The step, and in a hook of SBPS the time, of the parameters' values.
  virtual std::pair<int64_t, double> draw_time() const {
    return {num_steps(), 0};
  }

 protected:
  // ---- Hooks ----------------------------------------------------------------

  // Initialises and checks state; fills lists.state. Called for all lists
  // before the first update.
  virtual void prepare(TensorLists& lists);
  // Calls prepare() for all lists, and fills lists.masters.
  virtual void prepare_all(std::vector<TensorLists>& lists);
  // The operator of an update with these options; null if code is.
  virtual const char* op_of(const OptionValues& /*options*/) const {
    return op_;
  }
  // Updates lists.params, on one device.
  virtual void update(const TensorLists& lists) { update_by(op_, lists); }
  virtual Start start_of_momenta(const OptionValues& /*options*/) const {
    return Start::kStationary;
  }
  // The keys of a parameter's state, in the order of a state dict.
  virtual std::vector<std::string> state_keys() const;
  // Makes further checks of saved state of the parameter number `index`.
  virtual void check_saved_state(const SamplerParamState& /*state*/,
                                 int64_t /*index*/) const {}
  // Makes checks that ranges cannot express.
  virtual void check_options(const OptionValues& /*options*/) const {}
  // Checks saved counters.
  virtual void check_progress(const NamedValues& /*progress*/,
                              const OptionValues& /*options*/) const {}
  // Hyperparameters that are equal in all groups, and the reason.
  virtual std::vector<std::string> shared_names() const {
    return {"num_chains"};
  }
  virtual const char* why_equal() const {
    return "there is one stream of noise for all";
  }
  virtual std::vector<std::string> nonfinite_choices() const {
    return {"raise", "skip", "ignore"};
  }
  // K for K chains with a seed each, else 0.
  virtual int64_t chains_with_seeds(const OptionValues& options) const {
    return options.chains().value_or(0);
  }
  // True if the host reads the finite check at the next step.
  virtual bool is_check_deferred(const std::vector<TensorLists>& lists) const;
  // Called when parameters or their state may have been replaced.
  virtual void parameters_changed() {}
  // Called when a group's prior means are given anew.
  virtual void means_changed() {}

  // ---- The parts of a step --------------------------------------------------

  // Checks options, and that parameters have their noise offsets.
  void begin_step();
  // Checks groups and gradients; returns the lists to update.
  std::vector<TensorLists> gather();
  // Throws if an operator would refuse parameters, gradients or state.
  void check_fit(const std::vector<TensorLists>& lists) const;
  // Throws (StepSkipped with "skip") if a gradient is not finite.
  void check_finite(const std::vector<TensorLists>& lists);
  // Updates all lists and counts the step.
  void advance(const std::vector<TensorLists>& lists);
  // Calls an operator with the group's hyperparameters, except those given
  // instead.
  void update_by(
      const char* op, const TensorLists& lists,
      std::initializer_list<std::pair<std::string_view, double>> instead = {});
  void skip_step();

  // Throws unless all groups are known, valid, and have equal shared values.
  void check_groups() const;
  // Throws unless shared values are equal in all groups.
  void check_shared() const;
  // Throws unless values of these names are equal in all groups.
  void check_equal(const std::vector<std::string>& names,
                   const char* why) const;
  // Throws if a group was not added by this class.
  void check_known(size_t group) const;
  // Throws if options are out of range; unchanged options are not checked
  // again.
  void check(const OptionValues& options) const;
  std::string nonfinite() const;
  // True if lr is 0 in all groups.
  bool rests() const;
  auto& states() const { return owner_->state(); }
  const std::vector<int64_t>& offsets_of(size_t group) const {
    return chain_.groups[group].offsets;
  }

  const char* op_;
  // Further counters.
  NamedValues progress_;

 private:
  const OptionValues& defaults() const {
    return OptionAccess::Of(owner_->defaults());
  }
  void collect(size_t group, std::vector<TensorLists>& lists);
  TensorLists begin_lists(size_t group, bool on_cuda,
                          const Scales& scales) const;
  void check_unchanged(const at::Tensor& param) const;
  void check_fit(const TensorLists& lists, size_t index) const;
  std::unique_ptr<torch::optim::OptimizerOptions> options_for(
      const ParamGroup& param_group) const;
  void check_new(const Tensors& params, const OptionValues& options) const;
  void keep_means(OptionValues& options, const Tensors& params);
  const Method& method_of(const char* op, const OptionValues& options);
  void check_numbers();
  void follow_groups();
  void complete(size_t group);
  void complete_means(size_t group, OptionValues& options);
  void complete_all() const;
  bool has_moved(const std::vector<TensorLists>& lists) const;
  void set_gate(std::vector<TensorLists>& lists);
  void catch_up();
  void throw_pending_error();

  // For changed lr, T or N.
  bool leaves_momenta(const std::vector<TensorLists>& lists) const;
  void redraw_momenta();
  void multiply_state(size_t group, const Scales& scales,
                      const std::vector<TensorLists>& updated);
  void finish_rescaling(const std::vector<TensorLists>& lists);
  void rescale_now(std::vector<TensorLists>& lists);

  struct Loaded;
  void check_saved_groups(const c10::IValue& theirs) const;
  Loaded read(const c10::IValue& theirs, const StateDict& state) const;
  void read_states(const StateDict& state, size_t group,
                   const std::vector<int64_t>& indices, bool is_blank,
                   Loaded& loaded) const;
  void take(Loaded loaded);
  StateDict write_group(const OptionValues& options,
                        const NamedValues& progress, const ChainState& chain,
                        size_t index) const;
  void read_group(const StateDict& saved, size_t index, OptionValues& options,
                  NamedValues& progress, ChainState& chain) const;
  std::unique_ptr<SamplerParamState> read_state(
      const StateDict& kept, const at::Tensor& param, int64_t index,
      const OptionValues& options) const;
  void read_means(const StateDict& state, size_t group,
                  const std::vector<int64_t>& indices,
                  std::unordered_map<const void*, at::Tensor>& means) const;

  Sampler* owner_ = nullptr;
  ChainState chain_;
  DeferredFiniteCheck finite_check_;
  // Prior means that are tensors, by the parameter's TensorImpl.
  std::unordered_map<const void*, at::Tensor> prior_means_;
  // The parameters of the last step, with gradients and state that fit.
  std::vector<const void*> moved_;
  // True if the constructor's group was given tensors.
  bool has_means_ = false;
  // True if momenta are rescaled.
  bool keeps_momenta_ = false;
  std::vector<Method> methods_;

  bool has_warned_of_no_gradient_ = false;
};

// A reference that stays valid when the sampler is moved. Throws
// std::logic_error if it was moved from.
struct SamplerAccess {
  static std::weak_ptr<SamplerImpl> Of(const Sampler& sampler) {
    sampler.impl();
    return sampler.impl_;
  }
};

// Throws std::logic_error if the sampler was destroyed.
std::shared_ptr<SamplerImpl> Locked(const std::weak_ptr<SamplerImpl>& impl);

// "0 of group 1, of shape [2, 3]"
std::string NameOf(const std::vector<ParamGroup>& groups,
                   const at::Tensor& param);

#ifdef TORCH_SGMCMC_TESTS
// Defers finite checks on the CPU, too.
TORCH_SGMCMC_API void DeferFiniteChecksOnCpu(bool value);
#endif

// Throws if capturable, which samplers that decide on the host cannot be.
void CheckNotCapturable(const OptionValues& options);

// Samplers by name. Each registers itself in the file of its stem, in the
// initialiser of a static variable, which runs when the library is loaded.
using MakeSampler = std::shared_ptr<SamplerImpl> (*)();
bool Register(const char* name, MakeSampler make);
bool IsRegistered(std::string_view name);

template <class Options, class Impl>
bool Register() {
  return Register(Options::kSampler, []() -> std::shared_ptr<SamplerImpl> {
    return std::make_shared<Impl>();
  });
}

}  // namespace torch_sgmcmc
