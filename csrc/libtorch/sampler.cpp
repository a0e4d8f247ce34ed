#include "torch_sgmcmc/sampler.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
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
#include "libtorch/core/rescaling.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"
#include "libtorch/core/versions.h"
#include "torch_sgmcmc/has_cuda.h"

namespace torch_sgmcmc {

using torch::optim::OptimizerParamGroup;

namespace {

// As draw_seed of torch_sgmcmc/chain/checks.py: the same seed from the same
// state of torch's generator.
int64_t DrawSeed() {
  return torch::randint(std::numeric_limits<int64_t>::max(),
                        {},
                        at::TensorOptions(at::kLong))
      .item<int64_t>();
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
  ledger_->keeps_momenta = !RecordKeys(options).empty();
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
    is_default_mean = !own->is_set("prior_mean");
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
  if (rests()) return loss;
  if (ledger_->keeps_momenta && ledger_->capturable) rescale_now(work);
  if (work.empty() && !std::exchange(ledger_->said_nothing_moves, true)) {
    TORCH_WARN(name(),
               " has counted a step in which no parameter had a gradient (of "
               "those that require one): nothing has moved. Was backward() "
               "forgotten, or zero_grad() called after it?");
  }
  try {
    check_finite(work);
    if (ledger_->keeps_momenta) redraw_momenta();
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
  for (const Work& lists : work) {
    update(lists);
    BumpVersions(lists.params);
  }
  if (ledger_->keeps_momenta) finish_rescaling(work);
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
  Ledger::Group& own = ledger_->groups[group];
  const double scale = FollowEstimate(own.records, options);
  if (scale != options.estimate_scale_) {
    options.estimate_scale_ = scale;
    options.are_in_range_ = false;
  }
  options.check();
  if (options.lr() == 0) return;
  const Scales scales = ScalesOf(own.records, options);
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
      lists.momentum_scale = scales.momentum;
      lists.thermostat_scale = scales.thermostat;
      const double estimate = options.number_or("noise_estimate", 0);
      lists.noise_estimate = std::isnan(estimate) ? 0 : estimate * scale;
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
  CheckFit("prior_mean", prior_mean_of(param), param, name());
  for (const auto& [key, value] : state_of(param).tensors()) {
    CheckFit(key.c_str(), value, param, name());
  }
}

at::Tensor Sampler::prior_mean_of(const at::Tensor& param) const {
  const auto found = prior_means_.find(param.unsafeGetTensorImpl());
  return found == prior_means_.end() ? at::Tensor() : found->second;
}

void Sampler::start_masters(Work& work) {
  for (const at::Tensor& param : work.params) {
    if (!HasMaster(param)) continue;
    at::Tensor& master = own_state_of(param)["master"];
    if (!master.defined()) master = param.detach().to(at::kFloat);
    work.masters.push_back(master);
  }
}

void Sampler::prepare_all(std::vector<Work>& work) {
  for (Work& lists : work) prepare(lists);
}

const SamplerParamState& Sampler::state_of(const at::Tensor& param) const {
  static const SamplerParamState none;
  const auto found = state_.find(param.unsafeGetTensorImpl());
  if (found == state_.end()) return none;
  return static_cast<const SamplerParamState&>(*found->second);
}

SamplerParamState& Sampler::own_state_of(const at::Tensor& param) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (state == nullptr) state = std::make_unique<SamplerParamState>();
  return static_cast<SamplerParamState&>(*state);
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
