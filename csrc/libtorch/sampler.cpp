#include "torch_sgmcmc/sampler.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "core/counter.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/ledger.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/nonfinite.h"
#include "libtorch/core/parameters.h"
#include "libtorch/core/prior.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/step_observer.h"
#include "libtorch/core/text.h"
#include "libtorch/core/versions.h"
#include "torch_sgmcmc/has_cuda.h"

namespace torch_sgmcmc {

using torch::optim::OptimizerParamGroup;

namespace detail {

void FromState(const StateDict& dict,
               const char* name,
               const at::Tensor& param,
               int64_t index,
               at::Tensor& result) {
  result = at::Tensor();
  if (!dict.contains(name)) return;
  const c10::IValue value = dict.at(name);
  CheckTensor(std::string(name) + " of parameter " + std::to_string(index),
              value,
              param.sizes());
  // A copy: the chain must not change what the caller holds.
  result = value.toTensor().detach().to(
      param.device(), StateDtype(param), /*non_blocking=*/false, true);
  // These have ranges, see CheckSavedDiagonal.
  for (const char* diagonal : {"mass",
                               "given_mass",
                               "given_friction",
                               "given_variance",
                               "preconditioner"}) {
    if (std::string_view(name) == diagonal) return;
  }
  CheckFiniteState(name, index, result);
}

void FromState(const StateDict& dict,
               const char* name,
               const at::Tensor&,
               int64_t,
               int64_t& result) {
  result = 0;
  if (!dict.contains(name)) return;
  FromValue(name, dict.at(name), result);
  CheckCount(name, result);
}

void CheckFit(const char* name,
              const at::Tensor& value,
              const at::Tensor& param,
              const char* sampler) {
  if (!value.defined()) return;
  const at::ScalarType wanted = StateDtype(param);
  if (value.sizes() == param.sizes() && value.scalar_type() == wanted &&
      value.device() == param.device() && value.layout() == at::kStrided &&
      (value.is_contiguous() || !MayRepeat(value))) {
    return;
  }
  throw std::runtime_error(
      std::string(sampler) + " has a " + name + " of " +
      DtypeName(value.scalar_type()) + " and shape " + Shape(value.sizes()) +
      " on " + value.device().str() + " for a parameter of shape " +
      Shape(param.sizes()) + " (must be of " + DtypeName(wanted) +
      ", torch::kStrided and of its shape on " + param.device().str() +
      ", each element with memory of its own): was the parameter replaced?");
}

void CheckShape(const char* name,
                const at::Tensor& value,
                const at::Tensor& param) {
  if (!value.defined() || value.sizes() == param.sizes()) return;
  Invalid(std::string("Invalid state: ") + name + " of shape " +
          Shape(value.sizes()) + " for a parameter of shape " +
          Shape(param.sizes()) +
          " (put one of its shape in its place, or erase the parameter's from "
          "state() to begin anew)");
}

}  // namespace detail

namespace {

// As draw_seed of torch_sgmcmc/core/checks.py: the same seed from the same
// state of torch's generator.
int64_t DrawSeed() {
  return torch::randint(std::numeric_limits<int64_t>::max(),
                        {},
                        at::TensorOptions(at::kLong))
      .item<int64_t>();
}

StateDict DictAt(const c10::IValue& list, size_t index, const char* what) {
  const c10::IValue entry = list.toListRef()[index];
  if (!entry.isGenericDict()) {
    Invalid(std::string("Invalid state_dict: ") + what + " " +
            std::to_string(index) + " is a " + KindOf(entry) +
            " (must be a dict)");
  }
  return entry;
}

c10::IValue ListOf(const StateDict& dict, const char* key) {
  c10::IValue value = dict.at(key);
  if (!value.isList()) {
    Invalid(std::string("Invalid state_dict: ") + key + " is a " +
            KindOf(value) + " (must be a list)");
  }
  return value;
}

std::vector<int64_t> IntegersOf(const StateDict& dict, const char* key) {
  const c10::IValue list = ListOf(dict, key);
  std::vector<int64_t> result;
  for (const c10::IValue& item : list.toList().vec()) {
    result.push_back(0);
    detail::FromValue(key, item, result.back());
  }
  return result;
}

// A counter, which may be on a device.
int64_t CountAt(const StateDict& group, const char* key) {
  Count count;
  detail::FromValue(key, group.at(key), count);
  CheckCount(key, count.get());
  return count.get();
}

c10::IValue ToList(const std::vector<int64_t>& integers) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const int64_t integer : integers) list.push_back(integer);
  return list;
}

}  // namespace

Sampler::Sampler(const std::vector<OptimizerParamGroup>& param_groups,
                 std::unique_ptr<SamplerOptions> defaults)
    : Optimizer(std::vector<OptimizerParamGroup>{}, std::move(defaults)),
      watch_(std::make_unique<Watch>()),
      ledger_(std::make_unique<Ledger>()),
      place_(std::make_shared<Sampler*>(this)) {
  if (param_groups.empty()) Invalid("optimizer got an empty parameter list");
  for (const OptimizerParamGroup& group : param_groups) {
    if (group.params().empty() && param_groups.size() == 1) {
      Invalid("optimizer got an empty parameter list");
    }
  }
  auto& options = static_cast<SamplerOptions&>(*defaults_);
  if (!options.capturable_) options.capturable_ = false;
  if (!options.nonfinite_) options.nonfinite_ = "raise";
  CheckNonfinite(options);
  const std::optional<int64_t> given = std::exchange(options.seed_, {});
  ledger_->capturable = options.capturable();
  ledger_->progress = options.copy();
  // Groups may bring what the defaults leave open; they are checked whole.
  for (const OptimizerParamGroup& group : param_groups) {
    Sampler::add_param_group(group);
  }
  options.prior_means_.clear();  // the group has them
  ledger_->seed = given ? *given : DrawSeed();
}

const char* Sampler::name() const {
  ledger();  // throws if there is none
  return static_cast<const SamplerOptions&>(*defaults_).sampler();
}

SamplerOptions& Sampler::options_of(size_t group) {
  ledger();
  return static_cast<SamplerOptions&>(param_groups_[group].options());
}

const SamplerOptions& Sampler::options_of(size_t group) const {
  ledger();
  return static_cast<const SamplerOptions&>(param_groups_[group].options());
}

SamplerOptions& Sampler::progress_of() const { return *ledger().progress; }

const std::vector<int64_t>& Sampler::offsets_of(size_t group) const {
  return ledger_->groups[group].offsets;
}

int64_t Sampler::seed() const { return ledger().seed; }

int64_t Sampler::num_steps() const {
  num_skipped();  // which waits for the last step
  return steps_counted();
}

// That before a device has told what came of the last step.
int64_t Sampler::steps_counted() const {
  const Ledger& own = ledger();
  return own.groups.empty() ? 0 : own.groups[0].step.get();
}

void Sampler::add_param_group(const OptimizerParamGroup& param_group) {
  if (observer_ != nullptr) {
    Invalid(
        "Invalid param group: Gauges observe the groups that there are "
        "(detach() them first, and make new ones)");
  }
  catch_up();  // which may put the counters back
  complete_all();
  follow_groups();
  const auto& defaults = static_cast<const SamplerOptions&>(*defaults_);
  auto options = defaults.clone();
  bool is_default_mean = true;
  if (param_group.has_options()) {
    const auto* own =
        dynamic_cast<const SamplerOptions*>(&param_group.options());
    if (own == nullptr || typeid(*own) != typeid(defaults)) {
      Invalid(
          std::string("Invalid param group: its options are not of class ") +
          name() + "Options");
    }
    const auto managed =
        own->set_for_all(param_groups_.empty() ? defaults : options_of(0));
    if (!managed.empty()) {
      Invalid("Invalid param group: '" + managed[0] + "' is managed by " +
              name() + " and cannot be set for a group");
    }
    options = own->clone();
    if (own->means_are_kept_) {
      Invalid(
          "Invalid prior_mean: the param group's options are of a group with "
          "tensors, which are its sampler's (give this group its own, or a "
          "number)");
    }
    is_default_mean = !own->prior_mean_.is_set();
    auto& inheriting = static_cast<SamplerOptions&>(*options);
    inheriting.inherit(defaults);
    if (is_default_mean) inheriting.prior_means_ = defaults.prior_means_;
  }
  auto& group = static_cast<SamplerOptions&>(*options);
  group.share(param_groups_.empty() ? defaults : options_of(0));
  group.check();

  std::unordered_set<const void*> known;
  std::vector<std::vector<at::Tensor>> all;
  for (const OptimizerParamGroup& previous : param_groups_) {
    for (const at::Tensor& param : previous.params()) {
      known.insert(param.unsafeGetTensorImpl());
    }
    all.push_back(previous.params());
  }
  for (const at::Tensor& param : param_group.params()) {
    group.check_param(param);
    if (known.contains(param.unsafeGetTensorImpl())) {
      Invalid("some parameters appear in more than one parameter group");
    }
  }
  all.push_back(param_group.params());
  CheckMemory(all);
  Ledger::Group numbers;
  if (!group.prior_means_.empty()) {
    if (is_default_mean && !param_groups_.empty()) {
      Invalid(
          "Invalid prior_mean: tensors for a sampler of several param groups "
          "(give each group its own prior_mean)");
    }
    const auto means = CopiesOfMeans(group.prior_means_, param_group.params());
    group.prior_means_.clear();
    for (size_t i = 0; i < means.size(); ++i) {
      prior_means_[param_group.params()[i].unsafeGetTensorImpl()] = means[i];
    }
    numbers.has_means = group.means_are_kept_ = true;
  }
  group.is_complete_ = true;
  // It begins where nothing has ever been numbered.
  ledger_->next_offset = numbers.number(
      param_group.params(), group.chains_with_seeds(), ledger_->next_offset);
  numbers.set_counters(
      num_steps(), num_skipped(), ledger_->capturable, param_group.params());
  param_groups_.emplace_back(param_group.params(), std::move(options));
  ledger_->groups.push_back(std::move(numbers));
  ledger_->moved.clear();
  ledger_->absences = {0, {}, {}, false, ledger_->absences.said};
}

// NOLINTNEXTLINE(google-default-arguments): as torch's own.
torch::Tensor Sampler::step(LossClosure closure) {
  begin_step();
  torch::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  std::vector<Work> work = gather();
  if (work.empty() && !std::exchange(ledger_->said_nothing_moves, true)) {
    TORCH_WARN(name(),
               " has counted a step in which no parameter had a gradient (of "
               "those that require one): nothing has moved. Was backward() "
               "forgotten, or zero_grad() called after it?");
  }
  try {
    check_finite(work);
    prepare_all(work);
  } catch (const StepLeftOut&) {
    leave_out();
    return loss;
  }
  set_gate(work);
  advance(work);
  return loss;
}

std::vector<Work> Sampler::gather() {
  check_numbers();
  std::vector<Work> work;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    collect(group, work);
  }
  // An operator changes nothing if its arguments do not fit, but by then
  // another group's operator may have made its update, or a parameter been
  // given its first state.
  if (work.size() > 1 || !has_moved(work)) check_fit(work);
  return work;
}

void Sampler::check_fit(const std::vector<Work>& work) const {
  for (const Work& lists : work) {
    for (size_t i = 0; i < lists.params.size(); ++i) check_fit(lists, i);
  }
}

void Sampler::advance(const std::vector<Work>& work) {
  if (observer_ != nullptr) observer_->look(work);
  for (const Work& lists : work) {
    update(lists);
    BumpVersions(lists.params);
  }
  const bool is_gated = !work.empty() && work[0].gate.defined();
  for (Ledger::Group& group : ledger_->groups) {
    if (group.step.is_on_device() && is_gated) {
      group.step.device.add_(work[0].gate.ge(0));
      group.num_skipped.device.add_(work[0].gate.lt(0));
    } else {
      group.step.add(1);
    }
  }
  if (!work.empty()) look_for_absences(work);
}

void Sampler::check_groups() const {
  ledger();
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    check_known(group);
    options_of(group).check();
    if (options_of(group).agrees_with(options_of(0))) continue;
    std::vector<StateDict> values(param_groups_.size());
    for (size_t i = 0; i < values.size(); ++i) options_of(i).write(values[i]);
    CheckEqual(values, options_of(0).common_keys(), options_of(0).why_equal());
  }
}

std::vector<at::Tensor> Sampler::all_params() const {
  std::vector<at::Tensor> params;
  for (const OptimizerParamGroup& group : param_groups_) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

void Sampler::check_known(size_t group) const {
  if (group < ledger_->groups.size()) return;
  throw std::runtime_error(
      std::string(name()) + " does not know the parameters of group " +
      std::to_string(group) +
      ": add groups with the add_param_group of torch_sgmcmc::Sampler, not "
      "through a reference to torch::optim::Optimizer");
}

// The group's parameters that have a gradient, a list for each device.
void Sampler::collect(size_t group, std::vector<Work>& work) {
  SamplerOptions& options = options_of(group);
  const std::vector<at::Tensor>& params = param_groups_[group].params();
  check_known(group);
  options.check();
  const Ledger::Group& own = ledger_->groups[group];
  const size_t begin = work.size();
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    const at::Tensor& grad = param.grad();
    // What requires no gradient is not sampled, even if it has one.
    if (!grad.defined() || !param.requires_grad()) continue;
    if (grad.layout() != at::kStrided) {
      throw std::runtime_error(
          std::string(name()) +
          " does not support sparse gradients: got one of layout " +
          LayoutName(grad.layout()) + " for a parameter of shape " +
          Shape(param.sizes()) + " (for an Embedding, use sparse(false))");
    }
    size_t place = begin;
    while (place < work.size() &&
           work[place].params[0].device() != param.device()) {
      ++place;
    }
    if (place == work.size()) {
      if (param.is_cuda() && !has_cuda()) {
        throw std::runtime_error(
            std::string(name()) +
            " got parameters on a CUDA device, but torch_sgmcmc was built "
            "without CUDA kernels: rebuild it with -DTORCH_SGMCMC_CUDA=ON");
      }
      Work& lists = work.emplace_back();
      lists.options = &options;
      lists.seed = ledger_->seed;
      lists.step = own.step;
      lists.params.reserve(params.size());
      lists.grads.reserve(params.size());
      lists.offsets.reserve(params.size());
    }
    Work& lists = work[place];
    lists.params.push_back(param);
    const at::Tensor mean = prior_mean_of(param);
    if (mean.defined()) lists.prior_means.push_back(mean);
    if (own.has_means && !mean.defined()) {
      throw std::runtime_error(
          std::string(name()) + " has no prior_mean for parameter " +
          NameOf(param_groups_, param) +
          ", and tensors for its group: was it replaced? Give one for each by "
          "prior_mean()");
    }
    lists.grads.push_back(grad);
    lists.offsets.push_back(own.offsets[i]);
  }
}

// Throws if an operator would refuse the parameter, gradient or state.
void Sampler::check_fit(const Work& work, size_t index) const {
  const at::Tensor& param = work.params[index];
  const at::Tensor& grad = work.grads[index];
  if (!param.is_contiguous() || param.layout() != at::kStrided ||
      !param.is_floating_point() || !(param.is_cpu() || param.is_cuda())) {
    CheckParameter(name(), param);
    if (MayRepeat(param)) {
      throw std::runtime_error(
          std::string(name()) +
          " cannot update an expanded parameter (several elements share "
          "memory): shape " +
          Shape(param.sizes()) + ", strides " + Shape(param.strides()));
    }
  }
  CheckChains(param, work.options->chains());
  if (grad.scalar_type() != param.scalar_type() ||
      grad.sizes() != param.sizes() || grad.device() != param.device()) {
    throw std::runtime_error(
        std::string(name()) + " got a gradient of " +
        DtypeName(grad.scalar_type()) + " and shape " + Shape(grad.sizes()) +
        " on " + grad.device().str() + " for a parameter of " +
        DtypeName(param.scalar_type()) + " and shape " + Shape(param.sizes()) +
        " on " + param.device().str() + " (must be equal)");
  }
  if (work.step.is_on_device() && work.step.device.device() != param.device()) {
    throw std::runtime_error(
        std::string(name()) + " counts the steps of a group on " +
        work.step.device.device().str() + ", and has a parameter on " +
        param.device().str() +
        " (with capturable each group must lie on one device)");
  }
  if (!work.step.is_on_device() && work.step.host > kMaxStep) {
    throw std::runtime_error(std::string(name()) + " has made " +
                             std::to_string(work.step.host) +
                             " steps (must be below 2^48)");
  }
  detail::CheckFit("prior_mean", prior_mean_of(param), param, name());
  const auto found = state_.find(param.unsafeGetTensorImpl());
  if (found != state_.end()) {
    static_cast<const SamplerParamState&>(*found->second)
        .check_fit(param, name());
  }
}

at::Tensor Sampler::prior_mean_of(const at::Tensor& param) const {
  const auto found = prior_means_.find(param.unsafeGetTensorImpl());
  return found == prior_means_.end() ? at::Tensor() : found->second;
}

void Sampler::prepare(Work&) {}

void Sampler::start_masters(Work& work) {
  for (const at::Tensor& param : work.params) {
    if (!HasMaster(param)) continue;
    at::Tensor& master = state_of(param).master;
    if (!master.defined()) master = param.detach().to(at::kFloat);
    work.masters.push_back(master);
  }
}

void Sampler::prepare_all(std::vector<Work>& work) {
  for (Work& lists : work) prepare(lists);
}

std::unique_ptr<SamplerParamState> Sampler::new_state() const {
  return nullptr;
}

void Sampler::write_common(StateDict&) const {}

std::vector<std::string> Sampler::common_keys() const { return {}; }

std::function<void()> Sampler::read_common(const StateDict&) {
  return [] {};
}

SamplerParamState& Sampler::state_of(const at::Tensor& param) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (state == nullptr) state = new_state();
  return static_cast<SamplerParamState&>(*state);
}

StateDict Sampler::state_dict() const {
  num_skipped();  // which waits for the last step's
  complete_all();
  StateDict state;
  c10::impl::GenericList groups(c10::AnyType::get());
  int64_t index = 0;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    check_known(i);
    const auto options = options_of(i).copy();
    options->take_progress(*ledger_->progress);
    const Ledger::Group& own = ledger_->groups[i];
    StateDict group;
    options->write(group);
    group.set("capturable", options->capturable());
    group.set("seed", seed());
    group.set("nonfinite", options->nonfinite());
    group.set("step", own.step.saved());
    group.set("num_skipped", own.num_skipped.saved());
    group.set("offsets", ToList(own.offsets));
    group.set("sizes", ToList(own.sizes));
    group.set("next_offset", ledger_->next_offset);
    std::vector<int64_t> indices;
    for (const at::Tensor& param : param_groups_[i].params()) {
      const auto found = state_.find(param.unsafeGetTensorImpl());
      const at::Tensor mean = prior_mean_of(param);
      StateDict kept;
      if (found != state_.end()) {
        kept = static_cast<const SamplerParamState&>(*found->second).to_dict();
      }
      if (mean.defined()) kept.set("prior_mean", mean);
      if (found != state_.end() || mean.defined()) state.set(index, kept);
      indices.push_back(index++);
    }
    group.set("params", ToList(indices));
    groups.push_back(group);
  }
  write_common(state);
  return {{"state", state}, {"param_groups", groups}};
}

void Sampler::load_state_dict(const StateDict& dict) {
  catch_up();
  follow_groups();
  for (size_t i = 0; i < param_groups_.size(); ++i) check_known(i);
  complete_all();
  const c10::IValue groups = ListOf(dict, "param_groups");
  const StateDict state = dict.at("state");
  const size_t num_groups = groups.toListRef().size();
  if (num_groups != param_groups_.size()) {
    Invalid("Invalid state_dict: it has " + std::to_string(num_groups) +
            " param groups, expected " + std::to_string(param_groups_.size()));
  }
  for (size_t i = 0; i < num_groups; ++i) {
    CheckGroupKeys(DictAt(groups, i, "param group"),
                   static_cast<int64_t>(i),
                   options_of(i));
  }
  // All is read and checked first, and put in place when nothing can fail.
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> new_options;
  std::vector<std::pair<void*, std::unique_ptr<SamplerParamState>>> new_states;
  std::unordered_map<const void*, at::Tensor> new_means;
  std::vector<std::string> known = common_keys();
  Ledger saved;
  saved.capturable = ledger_->capturable;
  for (size_t i = 0; i < num_groups; ++i) {
    const StateDict group = DictAt(groups, i, "param group");
    auto& ours = param_groups_[i];
    new_options.push_back(ours.options().clone());
    auto& options = static_cast<SamplerOptions&>(*new_options.back());
    const auto indices = IntegersOf(group, "params");
    if (indices.size() != ours.params().size()) {
      Invalid("Invalid state_dict: param group " + std::to_string(i) + " has " +
              std::to_string(indices.size()) + " parameters, expected " +
              std::to_string(ours.params().size()));
    }
    read_group(group, static_cast<int64_t>(i), ours.params(), options, saved);
    read_means(
        state, static_cast<int64_t>(i), ours.params(), indices, new_means);
    for (size_t p = 0; p < indices.size(); ++p) {
      known.push_back(std::to_string(indices[p]));
      if (!state.contains(indices[p])) continue;
      const StateDict saved = state.at(indices[p]);
      auto restored = new_state();
      std::vector<std::string> keys = {"prior_mean"};
      if (restored != nullptr) {
        const auto more = restored->keys();
        keys.insert(keys.end(), more.begin(), more.end());
      }
      CheckKnownKeys(saved,
                     keys,
                     "the state of parameter " + std::to_string(indices[p]),
                     name());
      // Before its first step a parameter has no other state.
      const bool is_mean_alone =
          saved.contains("prior_mean") && saved.entries().size() == 1;
      if (restored == nullptr || is_mean_alone) continue;
      const at::Tensor& param = ours.params()[p];
      restored->from_dict(saved, param, indices[p]);
      // In lower precision the chain had one.
      if (!HasMaster(param)) restored->master = at::Tensor();
      new_states.emplace_back(param.unsafeGetTensorImpl(), std::move(restored));
    }
  }
  CheckKnownKeys(state, known, "its state", name());
  check_shared(new_options, saved, groups);
  check_saved(saved);

  const std::function<void()> put_common_in_place = read_common(state);

  *watch_ = Watch();  // that was of the chain that is left
  state_.clear();
  for (auto& [param, restored] : new_states) {
    state_[param] = std::move(restored);
  }
  prior_means_ = std::move(new_means);
  put_common_in_place();
  ledger_->progress->share(static_cast<SamplerOptions&>(*new_options[0]));
  for (size_t i = 0; i < num_groups; ++i) {
    Ledger::Group& own = saved.groups[i];
    own.has_means = false;
    for (const at::Tensor& param : param_groups_[i].params()) {
      own.has_means = own.has_means || prior_mean_of(param).defined();
    }
    static_cast<SamplerOptions&>(*new_options[i]).means_are_kept_ =
        own.has_means;
    param_groups_[i].set_options(std::move(new_options[i]));
  }
  ledger_->groups = std::move(saved.groups);
  ledger_->next_offset = saved.next_offset;
  ledger_->seed = saved.seed;
  ledger_->capturable = options_of(0).capturable();
  ledger_->moved.clear();
  auto& defaults = static_cast<SamplerOptions&>(*defaults_);
  defaults.capturable_ = options_of(0).capturable_;
  defaults.nonfinite_ = options_of(0).nonfinite_;
}

// Takes a saved group into options, which are those of a group of ours.
void Sampler::read_group(const StateDict& group,
                         int64_t index,
                         const std::vector<at::Tensor>& params,
                         SamplerOptions& options,
                         Ledger& own) const {
  Ledger::Group& numbers = own.groups.emplace_back();
  numbers.offsets = IntegersOf(group, "offsets");
  numbers.sizes = IntegersOf(group, "sizes");
  Ledger::Group now;
  now.number(params, ledger_->progress->chains_with_seeds(), /*begin=*/0);
  numbers.params = std::move(now.params);
  if (numbers.sizes != now.sizes) {
    Invalid("Invalid state_dict: param group " + std::to_string(index) +
            " was saved for parameters of other sizes (" +
            Shape(numbers.sizes) + ", expected " + Shape(now.sizes) + ")");
  }
  int64_t next = 0;
  detail::FromValue("next_offset", group.at("next_offset"), next);
  int64_t key = 0;
  detail::FromValue("seed", group.at("seed"), key);
  if (index == 0) {
    own.next_offset = next;
    own.seed = key;
  }
  options.read(group, index);
  if (!group.at("capturable").isBool()) {
    Invalid("Invalid capturable in a state dict: a " +
            KindOf(group.at("capturable")) + " (must be a bool)");
  }
  options.capturable_ = group.at("capturable").toBool();
  const int64_t made = CountAt(group, "step");
  // Those of versions that did not look at gradients lack these.
  if (group.contains("nonfinite")) {
    detail::FromValue(
        "nonfinite", group.at("nonfinite"), options.nonfinite_.emplace());
    CheckNonfinite(options);
  }
  const int64_t skipped = group.contains("num_skipped")
                              ? CountAt(group, "num_skipped")
                              : num_skipped();
  options.check();
  options.check_progress();
  for (const at::Tensor& param : params) options.check_param(param);
  numbers.set_counters(made, skipped, options.capturable(), params);
}

// Takes the means of a saved group's priors, if it has them.
void Sampler::read_means(
    const StateDict& state,
    int64_t group,
    const std::vector<at::Tensor>& params,
    const std::vector<int64_t>& indices,
    std::unordered_map<const void*, at::Tensor>& means) const {
  size_t having = 0;
  std::string lacking;
  std::vector<at::Tensor> still;
  for (size_t p = 0; p < indices.size(); ++p) {
    at::Tensor mean;
    if (state.contains(indices[p])) {
      detail::FromState(
          state.at(indices[p]), "prior_mean", params[p], indices[p], mean);
    }
    const std::string index = std::to_string(indices[p]);
    if (!mean.defined()) {
      // torch.distributed.checkpoint leaves out what requires no gradients.
      if (!params[p].requires_grad()) {
        still.push_back(params[p]);
      } else if (lacking.empty()) {
        lacking = index;
      }
      continue;
    }
    means[params[p].unsafeGetTensorImpl()] = mean;
    ++having;
  }
  if (having == 0) return;
  for (const at::Tensor& param : still) {
    const at::Tensor own = prior_mean_of(param);
    means[param.unsafeGetTensorImpl()] =
        own.defined() ? own
                      : ZeroState(param).fill_(options_of(group).prior_mean());
  }
  if (lacking.empty()) return;
  Invalid("Invalid state_dict: in param group " + std::to_string(group) +
          " parameter " + lacking + " has no prior_mean, and others have");
}

// Throws unless what groups share is equal in all of them.
void Sampler::check_shared(
    const std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>& options,
    const Ledger& own,
    const c10::IValue& saved) {
  const auto at = [&](size_t i) -> const SamplerOptions& {
    return static_cast<const SamplerOptions&>(*options[i]);
  };
  std::vector<StateDict> groups;
  for (size_t i = 0; i < options.size(); ++i) {
    const SamplerOptions& group = at(i);
    StateDict& values = groups.emplace_back();
    group.write(values);
    for (const char* key : {"seed", "next_offset"}) {
      values.set(key, DictAt(saved, i, "param group").at(key));
    }
    values.set("step", own.groups[i].step.get());
    values.set("capturable", group.capturable());
    values.set("nonfinite", group.nonfinite());
    values.set("num_skipped", own.groups[i].num_skipped.get());
  }
  std::vector<std::string> keys = {
      "seed", "step", "next_offset", "capturable", "nonfinite", "num_skipped"};
  const auto common = at(0).common_keys();
  keys.insert(keys.end(), common.begin(), common.end());
  CheckEqual(groups, keys, at(0).why_equal());
}

void Sampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("state_dict", state_dict());
}

void Sampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue dict;
  archive.read("state_dict", dict);
  load_state_dict(dict);
}

std::string Sampler::target_summary() const {
  complete_all();
  std::vector<std::string> means;
  bool are_zero = true;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const auto& params = param_groups_[i].params();
    const bool is_tensor = std::ranges::any_of(
        params,
        [&](const at::Tensor& p) { return prior_mean_of(p).defined(); });
    means.push_back(is_tensor ? "μ" : FourDigits(options_of(i).prior_mean()));
    are_zero = are_zero && means.back() == "0";
  }
  std::string text = std::string(name()) +
                     " samples p(θ) ∝ exp(−U(θ)/T), "
                     "U(θ) = N · (mean loss) + Σ λ‖" +
                     (are_zero ? "θ" : "θ − μ") + "‖²/2.";
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const SamplerOptions& options = options_of(i);
    const double n = options.num_data();
    const double t = options.temperature();
    const double precision = options.prior_precision();
    int64_t count = 0;
    for (const at::Tensor& param : param_groups_[i].params()) {
      if (param.requires_grad()) count += param.numel();
    }
    text += "\nGroup " + std::to_string(i) + ", " + Thousands(count) +
            " parameters: ";
    text += n == 1 ? std::string("the loss is U itself (N = 1)")
                   : "the loss is a mean over N = " + Thousands(n) + " data";
    text += precision == 0
                ? std::string("; flat prior (λ = 0)")
                : "; prior N(" + means[i] + ", " + FourDigits(1 / precision) +
                      ") on each (λ = " + FourDigits(precision) + ")";
    if (t == 1) {
      text += "; T = 1: the Bayesian posterior.";
    } else if (t == 0) {
      text += "; T = 0: no noise, an optimizer and not a sampler.";
    } else {
      text += "; T = " + FourDigits(t) + ": " + (t < 1 ? "colder" : "hotter") +
              " than the posterior.";
    }
  }
  return text;
}

}  // namespace torch_sgmcmc
