#include "torch_sgmcmc/sampler.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include "host/parameters.h"
#include "libtorch/checks.h"
#include "libtorch/sampler_impl.h"
#include "libtorch/tensor_lists.h"
#include "random/counter.h"

namespace torch_sgmcmc {

namespace {

// Equal to draw_seed in torch_sgmcmc/core/hyperparams.py.
int64_t DrawSeed() {
  return torch::randint(std::numeric_limits<int64_t>::max(), {},
                        at::TensorOptions(at::kLong))
      .item<int64_t>();
}

// Restores the records of noise estimates, unless the step is made.
class EstimateGuard {
 public:
  explicit EstimateGuard(std::vector<GroupState>& groups) : groups_(groups) {
    for (const GroupState& group : groups) {
      before_.push_back(group.records.estimate);
    }
  }
  ~EstimateGuard() {
    for (size_t i = 0; i < before_.size(); ++i) {
      groups_[i].records.estimate = before_[i];
    }
  }
  EstimateGuard(const EstimateGuard&) = delete;
  EstimateGuard& operator=(const EstimateGuard&) = delete;
  EstimateGuard(EstimateGuard&&) = delete;
  EstimateGuard& operator=(EstimateGuard&&) = delete;

  void keep() { before_.clear(); }

 private:
  std::vector<GroupState>& groups_;
  std::vector<std::optional<GroupRecords::Estimate>> before_;
};

// The parameters of modules that are tied are listed under each name.
Tensors WithoutRepeats(const Tensors& params) {
  std::unordered_set<const void*> known;
  Tensors unique;
  for (const at::Tensor& param : params) {
    if (known.insert(param.unsafeGetTensorImpl()).second) {
      unique.push_back(param);
    }
  }
  return unique;
}

// Throws unless state, if defined, fits its parameter.
void CheckFit(const char* name, const at::Tensor& value,
              const at::Tensor& param, const char* sampler) {
  if (!value.defined()) return;
  const at::ScalarType wanted = StateDtype(param);
  if (value.sizes() == param.sizes() && value.scalar_type() == wanted &&
      value.device() == param.device() && value.layout() == at::kStrided &&
      (value.is_contiguous() || !MayRepeat(value.sizes(), value.strides()))) {
    return;
  }
  Raise(sampler, " has a ", name, " of ", DtypeName(value.scalar_type()),
        " and shape ", Shape(value.sizes()), " on ", value.device().str(),
        " for a parameter of shape ", Shape(param.sizes()), " (must be of ",
        DtypeName(wanted), ", torch::kStrided and of its shape on ",
        param.device().str(),
        ", without shared elements): was the parameter replaced?");
}

// A parameter's state, which torch gives to everybody.
SamplerParamState& Ours(torch::optim::OptimizerParamState& state,
                        const char* sampler) {
  if (typeid(state) == typeid(SamplerParamState)) {
    return static_cast<SamplerParamState&>(state);
  }
  Raise(sampler,
        " has an object of another class in state() (must be "
        "torch_sgmcmc::SamplerParamState: use own_state_of())");
}

// Made by the first static variable that registers a sampler.
std::map<std::string_view, MakeSampler>& Registry() {
  static std::map<std::string_view, MakeSampler> registry;
  return registry;
}

std::shared_ptr<SamplerImpl> MakeImpl(const char* name) {
  const auto found = Registry().find(name);
  if (found != Registry().end()) return found->second();
  std::vector<std::string> known;
  for (const auto& [each, make] : Registry()) known.emplace_back(each);
  throw std::logic_error(c10::str("no sampler is registered for options of ",
                                  name, " (must be of ", Enumerated(known),
                                  ")"));
}

}  // namespace

bool Register(const char* name, MakeSampler make) {
  const bool is_new = Registry().emplace(name, make).second;
  if (!is_new) Raise("Two C++ samplers are registered as ", name);
  return is_new;
}

bool IsRegistered(std::string_view name) { return Registry().contains(name); }

// ---- The interface ----------------------------------------------------------

Sampler::Sampler(const std::vector<ParamGroup>& param_groups,
                 std::unique_ptr<SamplerOptions> defaults)
    : Optimizer(std::vector<ParamGroup>{}, std::move(defaults)),
      impl_(MakeImpl(OptionAccess::Of(*defaults_).sampler())) {
  impl_->set_owner(this);
  impl_->construct(param_groups);
}

Sampler::Sampler(Sampler&& other) noexcept
    : Optimizer(std::move(other)), impl_(std::move(other.impl_)) {
  if (impl_ != nullptr) impl_->set_owner(this);
}

Sampler& Sampler::operator=(Sampler&& other) noexcept {
  if (this == &other) return *this;
  // NOLINTBEGIN(bugprone-use-after-move): torch's part is moved, then ours.
  Optimizer::operator=(std::move(other));
  impl_ = std::move(other.impl_);
  // NOLINTEND(bugprone-use-after-move)
  if (impl_ != nullptr) impl_->set_owner(this);
  return *this;
}

Sampler::~Sampler() = default;

SamplerImpl& Sampler::impl() const {
  if (impl_ == nullptr) {
    throw std::logic_error(
        "this sampler was moved from: use the one that has "
        "its parameters now");
  }
  return *impl_;
}

ParamGroup& Sampler::group_at(size_t group) {
  auto& groups = param_groups();
  if (group >= groups.size()) {
    throw std::out_of_range(c10::str("Invalid group: ", group,
                                     " (the sampler has ", groups.size(),
                                     " param groups)"));
  }
  return groups[group];
}

std::shared_ptr<SamplerImpl> Locked(const std::weak_ptr<SamplerImpl>& impl) {
  auto locked = impl.lock();
  if (locked != nullptr) return locked;
  throw std::logic_error("the sampler that this belongs to has been destroyed");
}

// NOLINTNEXTLINE(google-default-arguments): as torch's own.
torch::Tensor Sampler::step(LossClosure closure) {
  return impl().step(closure);
}
void Sampler::add_param_group(const ParamGroup& param_group) {
  impl().add_param_group(param_group);
}
int64_t Sampler::seed() const { return impl().seed(); }
int64_t Sampler::num_steps() const { return impl().num_steps(); }
int64_t Sampler::num_skipped() const { return impl().num_skipped(); }
StateDict Sampler::state_dict() const { return impl().state_dict(); }
void Sampler::load_state_dict(const StateDict& dict) {
  impl().load_state_dict(dict);
}
const SamplerParamState& Sampler::state_of(const at::Tensor& param) const {
  return impl().state_of(param);
}
SamplerParamState& Sampler::own_state_of(const at::Tensor& param) {
  return impl().own_state_of(param);
}
void Sampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("state_dict", state_dict());
}
void Sampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue dict;
  if (!archive.try_read("state_dict", dict)) {
    Invalid("Invalid archive: it has no state dict of a sampler");
  }
  load_state_dict(dict);
}

bool has_cuda() {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("torch_sgmcmc::gaussian_", "")
      .hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

// ---- Groups -----------------------------------------------------------------

void SamplerImpl::construct(const std::vector<ParamGroup>& groups) {
  if (groups.empty() || (groups.size() == 1 && groups[0].params().empty())) {
    Invalid("optimizer got an empty parameter list");
  }
  OptionValues& options = OptionAccess::Of(owner_->defaults());
  CheckWord("nonfinite", options.nonfinite_choice(), nonfinite_choices());
  const std::optional<int64_t> given = std::exchange(options.seed, {});
  chain_.capturable = options.is_capturable();
  chain_.num_chains = chains_with_seeds(options);
  keeps_momenta_ = !RecordKeys(options, op_).empty();
  // Groups may set what the defaults do not.
  for (const ParamGroup& group : groups) add_param_group(group);
  has_means_ = !options.prior_means.empty();
  options.prior_means.clear();  // the group has them
  chain_.seed = given ? *given : DrawSeed();
}

int64_t SamplerImpl::num_steps() const {
  num_skipped();  // which waits for the last step
  return steps_counted();
}

int64_t SamplerImpl::steps_counted() const {
  return chain_.groups.empty() ? 0 : chain_.groups[0].step.get();
}

void SamplerImpl::add_param_group(const ParamGroup& param_group) {
  catch_up();  // which may put the counters back
  complete_all();
  follow_groups();
  auto options = options_for(param_group);
  OptionValues& group = OptionAccess::Of(*options);
  const Tensors params = WithoutRepeats(param_group.params());
  check_new(params, group);
  GroupState numbers;
  const bool is_own = param_group.has_options() && group.is_set("prior_mean");
  const bool has_tensors = has_means_ || !group.prior_means.empty();
  if (has_tensors && !is_own && !groups().empty()) {
    Invalid(
        "Invalid prior_mean: tensors for a sampler of several param groups "
        "(give each group its own prior_mean)");
  }
  if (!group.prior_means.empty()) {
    keep_means(group, params);
    numbers.has_means = true;
  }
  group.is_complete = true;
  chain_.next_offset =
      numbers.number(params, chains_with_seeds(group), chain_.next_offset);
  numbers.set_counters(num_steps(), num_skipped(), chain_.capturable, params);
  groups().emplace_back(params, std::move(options));
  chain_.groups.push_back(std::move(numbers));
  // A given estimate belongs to the settings that it was given with.
  FollowEstimate(chain_.groups.back().records, options_of(groups().size() - 1));
  moved_.clear();
}

// A new group's options, checked; the sampler's where it sets none.
std::unique_ptr<torch::optim::OptimizerOptions> SamplerImpl::options_for(
    const ParamGroup& param_group) const {
  std::vector<std::string> shared = {"capturable", "nonfinite"};
  const auto own_shared = shared_names();
  shared.insert(shared.end(), own_shared.begin(), own_shared.end());
  const OptionValues& ours = groups().empty() ? defaults() : options_of(0);
  auto options = owner_->defaults().clone();
  if (param_group.has_options()) {
    const torch::optim::OptimizerOptions& own = param_group.options();
    const torch::optim::OptimizerOptions& made_of = owner_->defaults();
    if (typeid(own) != typeid(made_of)) {
      Invalid("Invalid param group: its options are not of class ", name(),
              "Options");
    }
    const OptionValues& given = OptionAccess::Of(own);
    const auto managed = given.set_for_all(ours, shared);
    if (!managed.empty()) {
      Invalid("Invalid param group: '", managed[0], "' is managed by ", name(),
              " and cannot be set for a group");
    }
    if (given.means_are_kept) {
      Invalid(
          "Invalid prior_mean: the param group's options are of a group with "
          "tensors, which are its sampler's (give this group its own, or a "
          "number)");
    }
    options = own.clone();
    OptionValues& inheriting = OptionAccess::Of(*options);
    inheriting.inherit(defaults());
    if (!given.is_set("prior_mean")) {
      inheriting.prior_means = defaults().prior_means;
    }
  }
  OptionValues& values = OptionAccess::Of(*options);
  values.share(ours, shared);
  check(values);
  return options;
}

// Throws unless these can be the parameters of a further group.
void SamplerImpl::check_new(const Tensors& params,
                            const OptionValues& options) const {
  std::unordered_set<const void*> known;
  std::vector<Tensors> all;
  for (const ParamGroup& previous : groups()) {
    for (const at::Tensor& param : previous.params()) {
      known.insert(param.unsafeGetTensorImpl());
    }
    all.push_back(previous.params());
  }
  size_t number = 0;
  for (const at::Tensor& param : params) {
    CheckParameter(
        name(), param, options.chains(),
        c10::str(", number ", number++, " of group ", groups().size()));
    if (known.contains(param.unsafeGetTensorImpl())) {
      Invalid("some parameters appear in more than one parameter group");
    }
  }
  all.push_back(params);
  CheckMemory(all);
}

// ---- A step -----------------------------------------------------------------

torch::Tensor SamplerImpl::step(const LossClosure& closure) {
  begin_step();
  torch::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  EstimateGuard estimates(chain_.groups);
  std::vector<TensorLists> lists = gather();
  if (rests()) return loss;
  if (keeps_momenta_ && chain_.capturable) rescale_now(lists);
  if (lists.empty() && !std::exchange(has_warned_of_no_gradient_, true)) {
    TORCH_WARN(name(),
               " has counted a step in which no parameter had a gradient (of "
               "those that require one): nothing has moved. Was backward() "
               "forgotten, or zero_grad() called after it?");
  }
  try {
    check_finite(lists);
    if (keeps_momenta_ && !lists.empty()) redraw_momenta();
    prepare_all(lists);
  } catch (const StepSkipped&) {
    skip_step();
    return loss;
  }
  set_gate(lists);
  advance(lists);
  estimates.keep();
  return loss;
}

std::vector<TensorLists> SamplerImpl::gather() {
  check_numbers();
  std::vector<TensorLists> lists;
  for (size_t group = 0; group < groups().size(); ++group) {
    collect(group, lists);
  }
  check_shared();
  // An operator changes nothing if its arguments do not fit, but another
  // group's update may have been made before, or state created.
  if (lists.size() > 1 || !has_moved(lists)) check_fit(lists);
  return lists;
}

void SamplerImpl::check_fit(const std::vector<TensorLists>& lists) const {
  for (const TensorLists& each : lists) {
    for (size_t i = 0; i < each.params.size(); ++i) check_fit(each, i);
  }
}

void SamplerImpl::advance(const std::vector<TensorLists>& lists) {
  for (const TensorLists& each : lists) {
    update(each);
    BumpVersions(each.params);
  }
  // If nothing was updated, momenta still belong to their last settings.
  if (keeps_momenta_ && !lists.empty()) finish_rescaling(lists);
  const bool is_gated = !lists.empty() && lists[0].gate.defined();
  for (GroupState& group : chain_.groups) {
    if (group.step.is_on_device() && is_gated) {
      group.step.device.add_(lists[0].gate.ge(0));
      group.num_skipped.device.add_(lists[0].gate.lt(0));
    } else {
      group.step.add(1);
    }
  }
  if (lists.empty() || has_moved(lists)) return;
  moved_.clear();
  for (const TensorLists& each : lists) {
    for (const at::Tensor& param : each.params) {
      moved_.push_back(param.unsafeGetTensorImpl());
    }
  }
}

// True if exactly these parameters moved in the last step.
bool SamplerImpl::has_moved(const std::vector<TensorLists>& lists) const {
  auto known = moved_.begin();
  for (const TensorLists& each : lists) {
    for (const at::Tensor& param : each.params) {
      if (known == moved_.end() || *known++ != param.unsafeGetTensorImpl()) {
        return false;
      }
    }
  }
  return known == moved_.end();
}

void SamplerImpl::check_groups() const {
  for (size_t group = 0; group < groups().size(); ++group) {
    check_known(group);
    check(options_of(group));
  }
  check_shared();
}

void SamplerImpl::check_shared() const {
  if (groups().size() > 1) check_equal(shared_names(), why_equal());
}

void SamplerImpl::check_equal(const std::vector<std::string>& names,
                              const char* why) const {
  std::vector<StateDict> values(groups().size());
  bool are_equal = true;
  for (size_t i = 0; i < values.size(); ++i) {
    are_equal = are_equal && options_of(i).agrees_with(options_of(0), names);
  }
  if (are_equal) return;
  for (size_t i = 0; i < values.size(); ++i) options_of(i).write(values[i]);
  CheckEqual(values, names, why);
}

void SamplerImpl::check(const OptionValues& options) const {
  if (options.is_checked()) return;
  CheckWord("nonfinite", options.nonfinite_choice(), nonfinite_choices());
  options.check_ranges();
  check_options(options);
  options.set_checked(true);
}

Tensors SamplerImpl::all_params() const {
  Tensors params;
  for (const ParamGroup& group : groups()) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

void SamplerImpl::check_known(size_t group) const {
  if (group < chain_.groups.size()) return;
  Raise(name(), " does not know the parameters of group ", group,
        ": add groups with the add_param_group of torch_sgmcmc::Sampler, not "
        "through a reference to torch::optim::Optimizer");
}

// Adds the group's parameters with a gradient, a list for each device.
void SamplerImpl::collect(size_t group, std::vector<TensorLists>& lists) {
  OptionValues& options = options_of(group);
  const Tensors& params = groups()[group].params();
  check_known(group);
  GroupState& own = chain_.groups[group];
  const double scale = FollowEstimate(own.records, options);
  if (scale != options.estimate_scale) {
    options.estimate_scale = scale;
    options.set_checked(false);
  }
  check(options);
  if (options.lr() == 0) return;
  const Scales scales = ScalesOf(own.records, options, params);
  const size_t begin = lists.size();
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    const at::Tensor& grad = param.grad();
    if (!grad.defined() || !param.requires_grad()) continue;
    if (grad.layout() != at::kStrided) {
      Raise(name(), " does not support sparse gradients: got one of layout ",
            LayoutName(grad.layout()), " for a parameter of shape ",
            Shape(param.sizes()), " (for an Embedding, use sparse(false))");
    }
    size_t place = begin;
    while (place < lists.size() &&
           lists[place].params[0].device() != param.device()) {
      ++place;
    }
    if (place == lists.size()) {
      lists.push_back(begin_lists(group, param.is_cuda(), scales));
    }
    TensorLists& own_lists = lists[place];
    own_lists.params.push_back(param);
    const at::Tensor mean = prior_mean_of(param);
    if (mean.defined()) own_lists.prior_means.push_back(mean);
    if (own.has_means && !mean.defined()) {
      Raise(
          name(), " has no prior_mean for parameter ", NameOf(groups(), param),
          ", and tensors for its group: was it replaced? Give one for each by "
          "prior_mean()");
    }
    own_lists.grads.push_back(grad);
    own_lists.offsets.push_back(own.offsets[i]);
  }
}

// Lists of a group for one device, without tensors.
TensorLists SamplerImpl::begin_lists(size_t group, bool on_cuda,
                                     const Scales& scales) const {
  if (on_cuda && !has_cuda()) {
    Raise(name(),
          " got parameters on a CUDA device, but torch_sgmcmc was built "
          "without CUDA kernels: rebuild it with -DTORCH_SGMCMC_CUDA=ON");
  }
  const OptionValues& options = options_of(group);
  TensorLists lists;
  lists.options = &options;
  lists.seed = chain_.seed;
  lists.step = chain_.groups[group].step;
  lists.num_chains = chains_with_seeds(options);
  lists.momentum_scale = scales.momentum;
  lists.thermostat_scale = scales.thermostat;
  const double estimate = options.number_or("noise_estimate", 0);
  lists.noise_estimate =
      std::isnan(estimate) ? 0 : estimate * options.estimate_scale;
  const size_t count = groups()[group].params().size();
  lists.params.reserve(count);
  lists.grads.reserve(count);
  lists.offsets.reserve(count);
  return lists;
}

// Throws unless a parameter is as it was added.
void SamplerImpl::check_unchanged(const at::Tensor& param) const {
  const std::optional<int64_t> chains = options_of(0).chains();
  const bool has_chains =
      !chains || (param.dim() > 0 && param.size(0) == *chains);
  if (has_chains && param.is_contiguous() && param.layout() == at::kStrided &&
      param.is_floating_point() && (param.is_cpu() || param.is_cuda())) {
    return;
  }
  try {
    CheckParameter(name(), param, chains);
  } catch (const std::invalid_argument& error) {
    Raise(error.what());  // a step has found it
  }
  if (MayRepeat(param.sizes(), param.strides())) {
    Raise(name(),
          " cannot update an expanded parameter (several elements share "
          "memory): shape ",
          Shape(param.sizes()), ", strides ", Shape(param.strides()));
  }
}

void SamplerImpl::check_fit(const TensorLists& lists, size_t index) const {
  const at::Tensor& param = lists.params[index];
  const at::Tensor& grad = lists.grads[index];
  check_unchanged(param);
  if (grad.scalar_type() != param.scalar_type() ||
      grad.sizes() != param.sizes() || grad.device() != param.device()) {
    Raise(name(), " got a gradient of ", DtypeName(grad.scalar_type()),
          " and shape ", Shape(grad.sizes()), " on ", grad.device().str(),
          " for a parameter of ", DtypeName(param.scalar_type()), " and shape ",
          Shape(param.sizes()), " on ", param.device().str(),
          " (must be equal)");
  }
  if (lists.step.is_on_device() &&
      lists.step.device.device() != param.device()) {
    Raise(name(), " counts the steps of a group on ",
          lists.step.device.device().str(), ", and has a parameter on ",
          param.device().str(),
          " (with capturable each group must lie on one device)");
  }
  if (!lists.step.is_on_device() && lists.step.host > kMaxStep) {
    Raise(name(), " has made ", lists.step.host, " steps (must be below 2^48)");
  }
  CheckFit("prior_mean", prior_mean_of(param), param, name());
  for (const auto& [key, value] : state_of(param).tensors()) {
    CheckFit(key.c_str(), value, param, name());
  }
}

at::Tensor SamplerImpl::prior_mean_of(const at::Tensor& param) const {
  const auto found = prior_means_.find(param.unsafeGetTensorImpl());
  return found == prior_means_.end() ? at::Tensor() : found->second;
}

void SamplerImpl::prepare_all(std::vector<TensorLists>& lists) {
  for (TensorLists& each : lists) {
    prepare(each);
    for (const at::Tensor& param : each.params) {
      if (!HasMaster(param)) continue;
      at::Tensor& master = own_state_of(param)["master"];
      if (!master.defined()) master = param.detach().to(at::kFloat);
      each.masters.push_back(master);
    }
  }
}

const SamplerParamState& SamplerImpl::state_of(const at::Tensor& param) const {
  static const SamplerParamState none;
  const auto found = states().find(param.unsafeGetTensorImpl());
  if (found == states().end() || found->second == nullptr) return none;
  return Ours(*found->second, name());
}

SamplerParamState& SamplerImpl::own_state_of(const at::Tensor& param) {
  auto& state = states()[param.unsafeGetTensorImpl()];
  if (state == nullptr) state = std::make_unique<SamplerParamState>();
  return Ours(*state, name());
}

}  // namespace torch_sgmcmc
