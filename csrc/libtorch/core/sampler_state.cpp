// What a sampler saves, and what it must be to be loaded.
#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libtorch/core/checks.h"
#include "libtorch/core/ledger.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/nonfinite.h"
#include "libtorch/core/parameters.h"
#include "libtorch/core/rescaling.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

namespace {

constexpr std::string_view kNumGrads = "num_grads";

}  // namespace

at::Tensor& SamplerParamState::operator[](std::string_view name) {
  for (auto& [key, value] : tensors_) {
    if (key == name) return value;
  }
  return tensors_.emplace_back(name, at::Tensor()).second;
}

const at::Tensor& SamplerParamState::operator[](std::string_view name) const {
  static const at::Tensor none;
  for (const auto& [key, value] : tensors_) {
    if (key == name) return value;
  }
  return none;
}

bool SamplerParamState::is_empty() const {
  return !num_grads && std::ranges::none_of(tensors_, [](const auto& kept) {
    return kept.second.defined();
  });
}

namespace {

// A tensor of the saved state of a parameter as it is to be; undefined if there
// is none.
at::Tensor SavedTensor(const StateDict& kept,
                       const char* name,
                       const at::Tensor& param,
                       int64_t index) {
  if (!kept.contains(name)) return {};
  const c10::IValue value = kept.at(name);
  CheckTensor(std::string(name) + " of parameter " + std::to_string(index),
              value,
              param.sizes());
  // A copy: the chain must not change what the caller holds.
  return value.toTensor().detach().to(
      param.device(), StateDtype(param), /*non_blocking=*/false, true);
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
    result.push_back(detail::FromValue<int64_t>(key, item));
  }
  return result;
}

// A counter, which may be on a device.
int64_t CountAt(const StateDict& group, const char* key) {
  const auto count = detail::FromValue<Count>(key, group.at(key));
  CheckCount(key, count.get());
  return count.get();
}

c10::IValue ToList(const std::vector<int64_t>& integers) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const int64_t integer : integers) list.push_back(integer);
  return list;
}

}  // namespace

StateDict Sampler::state_dict() const {
  num_skipped();  // which waits for the last step's
  complete_all();
  StateDict state;
  const std::vector<std::string> keys = state_keys();
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
    WriteRecords(own.records, *options, group);
    std::vector<int64_t> indices;
    for (const at::Tensor& param : param_groups_[i].params()) {
      const auto found = state_.find(param.unsafeGetTensorImpl());
      const at::Tensor mean = prior_mean_of(param);
      StateDict kept;
      const SamplerParamState& known = state_of(param);
      for (const std::string& key : keys) {
        if (known[key].defined()) kept.set(key, known[key]);
        if (key == kNumGrads && known.num_grads) {
          kept.set(key, *known.num_grads);
        }
      }
      if (mean.defined()) kept.set("prior_mean", mean);
      if (found != state_.end() || mean.defined()) state.set(index, kept);
      indices.push_back(index++);
    }
    group.set("params", ToList(indices));
    groups.push_back(group);
  }
  return {{"state", state}, {"param_groups", groups}};
}

void Sampler::load_state_dict(const StateDict& dict) {
  catch_up();
  follow_groups();
  for (size_t i = 0; i < param_groups_.size(); ++i) check_known(i);
  complete_all();
  RefusePythonsAlone(dict);
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
  std::vector<std::string> known;
  const std::vector<std::string> keys = state_keys();
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
      const StateDict kept = state.at(indices[p]);
      std::vector<std::string> with_mean = keys;
      with_mean.emplace_back("prior_mean");
      CheckKnownKeys(kept,
                     with_mean,
                     "the state of parameter " + std::to_string(indices[p]),
                     name());
      // Before its first step a parameter has no other state.
      const bool is_mean_alone =
          kept.contains("prior_mean") && kept.entries().size() == 1;
      if (is_mean_alone) continue;
      const at::Tensor& param = ours.params()[p];
      new_states.emplace_back(param.unsafeGetTensorImpl(),
                              read_state(kept, keys, param, indices[p]));
    }
  }
  CheckKnownKeys(state, known, "its state", name());
  check_shared(new_options, saved, groups);
  check_saved(saved);

  *watch_ = Watch();  // that was of the chain that is left
  state_.clear();
  for (auto& [param, restored] : new_states) {
    state_[param] = std::move(restored);
  }
  prior_means_ = std::move(new_means);
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
  parameters_changed();
}

// What was saved of a parameter, on its device and in the precision that it
// asks for.
std::unique_ptr<SamplerParamState> Sampler::read_state(
    const StateDict& kept,
    const std::vector<std::string>& keys,
    const at::Tensor& param,
    int64_t index) const {
  auto state = std::make_unique<SamplerParamState>();
  for (const std::string& key : keys) {
    if (!kept.contains(key)) continue;
    if (key == kNumGrads) {
      state->num_grads = detail::FromValue<int64_t>("num_grads", kept.at(key));
      CheckCount("num_grads", *state->num_grads);
    } else {
      (*state)[key] = SavedTensor(kept, key.c_str(), param, index);
    }
  }
  check_saved_state(*state, index);
  for (const auto& [key, value] : state->tensors()) {
    CheckFiniteState(key.c_str(), index, value);
  }
  // In lower precision the chain had one.
  if (!HasMaster(param)) (*state)["master"] = at::Tensor();
  return state;
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
  const auto next =
      detail::FromValue<int64_t>("next_offset", group.at("next_offset"));
  const auto key = detail::FromValue<int64_t>("seed", group.at("seed"));
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
  options.nonfinite_ =
      detail::FromValue<std::string>("nonfinite", group.at("nonfinite"));
  CheckNonfinite(options);
  const int64_t skipped = CountAt(group, "num_skipped");
  options.check();
  options.check_progress();
  for (const at::Tensor& param : params) options.check_param(param);
  numbers.set_counters(made, skipped, options.capturable(), params);
  numbers.records = ReadRecords(group, options);
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
      mean = SavedTensor(
          state.at(indices[p]), "prior_mean", params[p], indices[p]);
      if (mean.defined()) CheckFiniteState("prior_mean", indices[p], mean);
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

}  // namespace torch_sgmcmc
