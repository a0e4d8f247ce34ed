// A sampler without its interface: what it keeps, and how a step goes.
//
// Note [Numbers of elements]
// Noise is a function of (seed, step, purpose, element). Each parameter has a
// range of elements of its own, from its offset on and as long as its size;
// beyond next_offset nothing has ever been numbered. A parameter that grows
// would reach into its neighbour's range, and independent coordinates would
// share their noise: every step checks sizes and refuses changes.
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
#include "libtorch/method.h"
#include "libtorch/options.h"
#include "libtorch/tensor_lists.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

// The step is to be skipped. It is not an error, and never leaves step().
struct StepSkipped {};

// What a closure has made is not finite; and its losses, where they are
// returned if the step is skipped.
class NonfiniteError : public std::runtime_error {
 public:
  explicit NonfiniteError(const std::string& message, at::Tensor losses = {})
      : std::runtime_error(message), losses_(std::move(losses)) {}

  const at::Tensor& losses() const { return losses_; }

 private:
  at::Tensor losses_;
};

// The lr, T and N that the state of a param group belongs to: Note [Rescaled
// momenta] of torch_sgmcmc/_impl/state.py.
struct GroupRecords {
  struct Estimate {
    double value = 0;
    MomentumSettings settings;
  };

  // None until there are momenta, or a number.
  std::optional<MomentumSettings> momenta;
  std::optional<Estimate> estimate;
};

// Factors for a step with momenta of other settings.
struct Scales {
  double momentum = 1;
  double thermostat = 1;
};
Scales ScalesOf(const GroupRecords& records, const OptionValues& options);
// Records where a noise estimate was given, if it is a new number; returns its
// factor for these options.
double FollowEstimate(GroupRecords& records, const OptionValues& options);

// To and from a param group of a state dict. Reading throws
// std::invalid_argument if a record is one that no chain leaves.
void WriteRecords(const GroupRecords& records, const OptionValues& options,
                  StateDict& group);
GroupRecords ReadRecords(const StateDict& group, const OptionValues& options);
// The keys of the records that a sampler with these options keeps.
std::vector<std::string> RecordKeys(const OptionValues& options);

// What a sampler keeps of one param group.
struct GroupState {
  std::vector<const void*> params;  // their TensorImpl, by which it is known
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  Count step;
  Count num_skipped;
  // True if the means of its priors are tensors.
  bool has_means = false;
  GroupRecords records;

  // Numbers all parameters from `begin` on; returns where the next begin.
  int64_t number(const std::vector<at::Tensor>& all, int64_t num_chains,
                 int64_t begin);
  // Counters on the device of these parameters, if capturable.
  void set_counters(int64_t steps, int64_t skipped, bool capturable,
                    const std::vector<at::Tensor>& all);
};

// Whose noise it is, and what was counted.
struct ChainState {
  std::vector<GroupState> groups;
  int64_t next_offset = 0;
  int64_t seed = 0;
  bool capturable = false;
  // Chains with a seed each, or 0.
  int64_t num_chains = 0;
};

// Throws unless each parameter has a saved range of its own.
void CheckRanges(const ChainState& saved);

// What a device counted of one kind of tensor, for each parameter.
struct FiniteCheck {
  const char* what;
  std::vector<at::Tensor> params;
  at::Tensor counts;
};

// The finite check of gradients: Note [Who checks gradients]
// of torch_sgmcmc/_impl/finite_check.py.
struct DeferredFiniteCheck {
  // What the device was asked in this step.
  std::vector<FiniteCheck> asked;
  // What it has yet to tell of the last step, and what was then to be done.
  std::vector<FiniteCheck> pending;
  std::string choice;
  std::optional<c10::Event> event;
  // Records of momenta as they were before it, by group.
  std::vector<std::pair<size_t, std::optional<MomentumSettings>>> undo;
  // The error that this has turned out to be; empty if there is none.
  std::string error;
};

class SamplerImpl {
 public:
  // `op` is the operator whose row (csrc/ops/op_spec.h) says how state begins
  // and what makes an update, null if code does.
  explicit SamplerImpl(const char* op) : op_(op) {}
  virtual ~SamplerImpl() = default;
  SamplerImpl(const SamplerImpl&) = delete;
  SamplerImpl(SamplerImpl&&) = delete;
  SamplerImpl& operator=(const SamplerImpl&) = delete;
  SamplerImpl& operator=(SamplerImpl&&) = delete;

  // Of the sampler, as it is now.
  void set_owner(Sampler* owner) { owner_ = owner; }
  Sampler& owner() const { return *owner_; }

  // Takes its defaults and first groups.
  void construct(const std::vector<torch::optim::OptimizerParamGroup>& groups);

  // See Sampler.
  virtual torch::Tensor step(
      const torch::optim::Optimizer::LossClosure& closure);
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);
  int64_t seed() const { return chain_.seed; }
  int64_t num_steps() const;
  int64_t num_skipped() const;
  StateDict state_dict() const;
  void load_state_dict(const StateDict& dict);
  const SamplerParamState& state_of(const at::Tensor& param) const;
  SamplerParamState& own_state_of(const at::Tensor& param);

  const char* name() const { return defaults().sampler(); }
  std::vector<torch::optim::OptimizerParamGroup>& groups() const {
    return owner_->param_groups();
  }
  OptionValues& options_of(size_t group) const {
    return OptionAccess::Of(groups()[group].options());
  }
  // The mean of a parameter's prior, undefined if that is its group's number.
  at::Tensor prior_mean_of(const at::Tensor& param) const;
  // The steps before a device has told what came of the last one.
  int64_t steps_counted() const;

 protected:
  // ---- What samplers override -----------------------------------------------

  // Initialises state and makes the checks that need it; fills lists.state and
  // lists.masters. Called for all lists before the first update.
  virtual void prepare(TensorLists& lists);
  // Calls prepare() for all lists; for what concerns them together.
  virtual void prepare_all(std::vector<TensorLists>& lists);
  // Makes one update of lists.params, which are on one device.
  virtual void update(const TensorLists& lists) { update_by(op_, lists); }
  // How momenta begin.
  virtual Start start_of_momenta(const OptionValues& /*options*/) const {
    return Start::kStationary;
  }
  // The names of what is remembered of a parameter, in the order of a state
  // dict.
  virtual std::vector<std::string> state_keys() const;
  // Throws std::invalid_argument if saved state of the parameter number `index`
  // is not as no row can say that it must be.
  virtual void check_saved_state(const SamplerParamState& /*state*/,
                                 int64_t /*index*/) const {}
  // Throws if options are not as no range can say that they must be.
  virtual void check_options(const OptionValues& /*options*/) const {}
  // Throws if a saved group says something invalid of what the sampler counts.
  virtual void check_progress(const NamedValues& /*progress*/,
                              const OptionValues& /*options*/) const {}
  // The hyperparameters that are equal in all groups, and why.
  virtual std::vector<std::string> shared_names() const {
    return {"num_chains"};
  }
  virtual const char* why_equal() const {
    return "there is one stream of noise for all";
  }
  virtual std::vector<std::string> nonfinite_choices() const {
    return {"raise", "skip", "ignore"};
  }
  // K if each of K chains has its own seed, else 0.
  virtual int64_t chains_with_seeds(const OptionValues& options) const {
    return options.chains().value_or(0);
  }
  // True if the host waits until the next step to see what was found.
  virtual bool is_check_deferred(const std::vector<TensorLists>& lists) const;
  // Called when parameters or their states may have been exchanged for others.
  virtual void parameters_changed() {}

  // ---- The parts of a step --------------------------------------------------

  // Comes first in a step. Throws unless the parameters are those whose noise
  // is numbered, and options are as they may be.
  void begin_step();
  // Checks groups and gradients and lists what there is to update.
  std::vector<TensorLists> gather();
  // Throws if an operator would refuse parameters, gradients or state.
  void check_fit(const std::vector<TensorLists>& lists) const;
  // Throws (and with "skip" something that step() catches) if a gradient is not
  // finite, or another tensor for each parameter that enters an update.
  void check_finite(const std::vector<TensorLists>& lists);
  void check_finite(const std::vector<TensorLists>& lists,
                    const std::vector<std::vector<at::Tensor>>& tensors,
                    const char* what);
  // Makes the update of everything listed and counts the step.
  void advance(const std::vector<TensorLists>& lists);
  // Makes the update of an operator with a row, with the group's
  // hyperparameters except for those given instead.
  void update_by(
      const char* op, const TensorLists& lists,
      std::initializer_list<std::pair<std::string_view, double>> instead = {});
  // Counts a skipped step.
  void skip_step();
  // Fills lists.masters, with new ones of parameters that have none yet.
  void start_masters(TensorLists& lists);

  // Throws unless all groups are known, have values in their ranges, and agree
  // on what they share.
  void check_groups() const;
  // Throws if a group was added in a way that passes this class by.
  void check_known(size_t group) const;
  // Throws if options are out of range, once for what they are.
  void check(const OptionValues& options) const;
  // "raise", "skip" or "ignore", for all groups.
  std::string nonfinite() const;
  // True if lr is 0 in all groups: a step then does nothing.
  bool rests() const;
  std::vector<at::Tensor> all_params() const;
  auto& states() const { return owner_->state(); }
  const std::vector<int64_t>& offsets_of(size_t group) const {
    return chain_.groups[group].offsets;
  }

  const char* op_;
  // What the class of sampler counts besides.
  NamedValues progress_;

 private:
  const OptionValues& defaults() const {
    return OptionAccess::Of(owner_->defaults());
  }
  void collect(size_t group, std::vector<TensorLists>& lists);
  void check_fit(const TensorLists& lists, size_t index) const;
  void check_param(const at::Tensor& param, const OptionValues& options,
                   const std::string& place = "") const;
  void check_nonfinite(const OptionValues& options) const;
  const Method& method_of(const char* op, const OptionValues& options);
  void check_numbers();
  void follow_groups();
  void complete(size_t group);
  void complete_means(size_t group, OptionValues& options);
  void complete_all() const;
  bool has_moved(const std::vector<TensorLists>& lists) const;
  void set_gate(std::vector<TensorLists>& lists);
  void catch_up();
  void throw_what_was_found();

  // Of momenta whose lr, T or N have changed.
  bool leaves_momenta(const std::vector<TensorLists>& lists) const;
  void redraw_momenta();
  void multiply_state(size_t group, const Scales& scales,
                      const std::vector<TensorLists>& updated);
  void finish_rescaling(const std::vector<TensorLists>& lists);
  void rescale_now(std::vector<TensorLists>& lists);

  // Of state dicts.
  StateDict write_group(const OptionValues& options,
                        const NamedValues& progress, const ChainState& chain,
                        size_t index) const;
  void read_group(const StateDict& saved, size_t index, OptionValues& options,
                  NamedValues& progress, ChainState& chain) const;
  std::unique_ptr<SamplerParamState> read_state(const StateDict& kept,
                                                const at::Tensor& param,
                                                int64_t index) const;
  void read_means(const StateDict& state, size_t group,
                  const std::vector<int64_t>& indices,
                  std::unordered_map<const void*, at::Tensor>& means) const;

  Sampler* owner_ = nullptr;
  ChainState chain_;
  DeferredFiniteCheck finite_check_;
  // What was given as tensors, of parameters by their TensorImpl.
  std::unordered_map<const void*, at::Tensor> prior_means_;
  // The parameters of the last step, all of which had a gradient and state that
  // fits.
  std::vector<const void*> moved_;
  // True if there are momenta that follow lr.
  bool keeps_momenta_ = false;
  // The operators that have made updates.
  std::vector<Method> methods_;

  bool is_warned_of_nothing_ = false;
};

// What follows a sampler when it is moved. Throws std::logic_error if it was
// moved from.
struct SamplerAccess {
  static std::weak_ptr<SamplerImpl> Of(const Sampler& sampler) {
    sampler.impl();
    return sampler.impl_;
  }
};

// Throws std::logic_error if there is no sampler any more.
std::shared_ptr<SamplerImpl> Locked(const std::weak_ptr<SamplerImpl>& impl);

// "0 of group 1, of shape [2, 3]"
std::string NameOf(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const at::Tensor& param);

// For tests, where there is no GPU: whether the host reads at the next step
// what was found of gradients on the CPU.
TORCH_SGMCMC_API void DeferFiniteChecksOnCpu(bool value);

// Throws if capturable: of samplers that decide on the host.
void CheckNotCapturable(const OptionValues& options);

// The first multiple of the noise block at or after offset + size.
int64_t NextOffset(int64_t offset, int64_t size);

// Samplers that have code, by their classes' names.
std::shared_ptr<SamplerImpl> MakeSGHMC();
std::shared_ptr<SamplerImpl> MakeBAOA();
std::shared_ptr<SamplerImpl> MakePSGLD();
std::shared_ptr<SamplerImpl> MakeSGNHT();
std::shared_ptr<SamplerImpl> MakeEWSG();
std::shared_ptr<SamplerImpl> MakeSBPS();

}  // namespace torch_sgmcmc
