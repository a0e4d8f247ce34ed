// State dicts of samplers: saving, checks and loading.
#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/parameters.h"
#include "host/settings.h"
#include "libtorch/checks.h"
#include "libtorch/sampler_impl.h"

namespace torch_sgmcmc {

namespace {

constexpr std::string_view kNumGrads = "num_grads";

// The format of state dicts; torch_sgmcmc/core/random_state.py has it, too.
constexpr int64_t kFormat = 1;

using Names = std::set<std::string>;  // sorted, as messages list them

std::string InARow(const Names& names) {
  return Enumerated({names.begin(), names.end()});
}

[[noreturn]] void Unknown(const std::string& where, const Names& keys,
                          const std::string& sampler) {
  Invalid("Invalid state_dict: ", where, " has ", InARow(keys), ", which ",
          sampler, " does not know; it is not one of ", sampler);
}

[[noreturn]] void RefusePythonOnly(const std::string& kind) {
  Invalid("Invalid state_dict: got one of ", kind,
          ", which C++ does not have. Continue it in Python");
}

void RefusePythonOnlyGroup(const StateDict& group) {
  if (group.contains("sampler") && group.at("sampler").isString()) {
    const std::string sampler = group.at("sampler").toStringRef();
    if (IsSampler(sampler) && !IsRegistered(sampler)) RefusePythonOnly(sampler);
  }
  constexpr std::pair<const char*, const char*> kByFlag[] = {
      {"gamma", "PSGLD with Γ"},
      {"persistent_index_chain", "EWSG with a persistent index chain"}};
  for (const auto& [key, kind] : kByFlag) {
    if (group.contains(key) && Alike(group.at(key), true)) {
      RefusePythonOnly(kind);
    }
  }
}

// Throws for state dicts of features that only Python has. Other types are
// refused where they are read.
void RefusePythonOnlyState(const StateDict& dict) {
  constexpr std::pair<const char*, const char*> kByKey[] = {
      {"full_grads", "ControlVariates or SVRG"},
      {"series", "TemperatureMonitor"},
      {"means", "TimeAverage"}};
  for (const auto& [key, kind] : kByKey) {
    if (dict.contains(key)) RefusePythonOnly(kind);
  }
  if (dict.contains("param_groups") && dict.at("param_groups").isList()) {
    for (const c10::IValue& value : dict.at("param_groups").toList().vec()) {
      if (value.isGenericDict()) RefusePythonOnlyGroup(value);
    }
  }
  if (!dict.contains("state") || !dict.at("state").isGenericDict()) return;
  const StateDict states = dict.at("state");
  for (const auto& entry : states.entries()) {
    if (!entry.value().isGenericDict()) continue;
    const StateDict state = entry.value();
    if (state.contains("sensitivity")) RefusePythonOnly("PSGLD with Γ");
    if (state.contains("preconditioner") && !state.contains("square_average")) {
      RefusePythonOnly("a sampler with a given preconditioner");
    }
  }
}

int64_t CountAt(const StateDict& group, const char* key) {
  const auto count = FromValue<int64_t>(key, group.at(key));
  CheckCount(key, count);
  return count;
}

// Throws if a saved group is of another class than ours, or lacks a key.
void CheckGroupKeys(const StateDict& group, int64_t index,
                    const StateDict& ours) {
  const std::string wanted = ours.at("sampler").toStringRef();
  if (group.contains("sampler") && !Alike(group.at("sampler"), wanted)) {
    const c10::IValue name = group.at("sampler");
    Invalid("Invalid state_dict: got one of ",
            (name.isString() ? name.toStringRef() : "a " + KindOf(name)),
            " (must be of ", wanted, "). Load it into a sampler of its class");
  }
  Names missing;
  for (const auto& entry : ours.entries()) {
    const std::string key = entry.key().toStringRef();
    if (!group.contains(key)) missing.insert(key);
  }
  if (!missing.empty()) {
    Invalid("Invalid state_dict: param group ", index, " lacks ",
            InARow(missing), "; it is not one of ", wanted);
  }
  const int64_t format = CountAt(group, "format");
  if (format != kFormat) {
    Invalid("Invalid state_dict: its format is ", format, " (must be ", kFormat,
            ": load it with the version of torch_sgmcmc that saved it)");
  }
}

// Throws if a dict has an unknown key; `where` names the dict.
void CheckKnownKeys(const StateDict& dict,
                    const std::vector<std::string>& known,
                    const std::string& where, const char* sampler) {
  Names unknown;
  for (const auto& entry : dict.entries()) {
    const std::string key = KeyText(entry.key());
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      unknown.insert(key);
    }
  }
  if (!unknown.empty()) Unknown(where, unknown, sampler);
}

// Throws unless all elements of a parameter's state are finite.
void CheckFiniteState(const char* name, int64_t index,
                      const at::Tensor& value) {
  if (value.isfinite().all().item<bool>()) return;
  Invalid("Invalid state_dict: ", name, " of parameter ", index,
          " has elements that are not finite");
}

// A copy of a saved tensor of a parameter, converted; undefined if missing.
at::Tensor SavedTensor(const StateDict& kept, const char* name,
                       const at::Tensor& param, int64_t index) {
  if (!kept.contains(name)) return {};
  const c10::IValue value = kept.at(name);
  const std::string what =
      std::string(name) + " of parameter " + std::to_string(index);
  CheckTensor("Invalid state_dict: " + what, value, param.sizes(),
              /*is_floating_point=*/true);
  return value.toTensor().detach().to(param.device(), StateDtype(param),
                                      /*non_blocking=*/false, true);
}

StateDict DictAt(const c10::IValue& list, size_t index, const char* what) {
  const c10::IValue entry = list.toListRef()[index];
  if (!entry.isGenericDict()) {
    Invalid("Invalid state_dict: ", what, " ", index, " is a ", KindOf(entry),
            " (must be a dict)");
  }
  return entry;
}

c10::IValue ListOf(const StateDict& dict, const char* key) {
  c10::IValue value = dict.at(key);
  if (!value.isList()) {
    Invalid("Invalid state_dict: ", key, " is a ", KindOf(value),
            " (must be a list)");
  }
  return value;
}

std::vector<int64_t> IntegersOf(const StateDict& dict, const char* key) {
  return FromValue<std::vector<int64_t>>(key, dict.at(key));
}

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

// ---- Saving -----------------------------------------------------------------

// A param group without its parameters' numbers.
StateDict SamplerImpl::write_group(const OptionValues& options,
                                   const NamedValues& progress,
                                   const ChainState& chain,
                                   size_t index) const {
  const GroupState& own = chain.groups[index];
  StateDict group = {{"sampler", name()}, {"format", SavedCount({kFormat})}};
  options.write(group);
  progress.write(group);
  WriteRecords(own.records, options, op_, group);
  group.set("seed", SavedCount({chain.seed}));
  group.set("step", SavedCount(own.step));
  group.set("num_skipped", SavedCount(own.num_skipped));
  group.set("offsets", ToValue(own.offsets));
  group.set("sizes", ToValue(own.sizes));
  group.set("next_offset", SavedCount({chain.next_offset}));
  return group;
}

StateDict SamplerImpl::state_dict() const {
  num_skipped();  // which waits for the last step's
  complete_all();
  const std::vector<std::string> keys = state_keys();
  StateDict state;
  c10::impl::GenericList saved(c10::AnyType::get());
  int64_t index = 0;
  for (size_t i = 0; i < groups().size(); ++i) {
    check_known(i);
    const int64_t steps = chain_.groups[i].step.get();
    StateDict group = write_group(options_of(i), progress_, chain_, i);
    std::vector<int64_t> indices;
    for (const at::Tensor& param : groups()[i].params()) {
      const auto found = states().find(param.unsafeGetTensorImpl());
      const at::Tensor mean = prior_mean_of(param);
      const SamplerParamState& known = state_of(param);
      StateDict kept;
      for (const std::string& key : keys) {
        if (known[key].defined()) kept.set(key, known[key].clone());
        if (key == kNumGrads && known.num_grads) {
          kept.set(key, SavedCount({*known.num_grads}));
        }
      }
      if (mean.defined()) kept.set("prior_mean", mean.clone());
      const bool has_state = found != states().end();
      if (steps > 0 && (has_state || param.requires_grad())) {
        kept.set("step", SavedCount(chain_.groups[i].step));
      }
      if (has_state || kept.size() > 0) state.set(index, kept);
      indices.push_back(index++);
    }
    group.set("params", ToValue(indices));
    saved.push_back(group);
  }
  return {{"state", state}, {"param_groups", saved}};
}

// ---- Loading ----------------------------------------------------------------

// All of a state dict, read and checked before the first change.
struct SamplerImpl::Loaded {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  std::vector<std::pair<void*, std::unique_ptr<SamplerParamState>>> states;
  std::unordered_map<const void*, at::Tensor> means;
  NamedValues progress;
  ChainState chain;
};

void SamplerImpl::load_state_dict(const StateDict& dict) {
  catch_up();
  follow_groups();
  for (size_t i = 0; i < groups().size(); ++i) check_known(i);
  complete_all();
  RefusePythonOnlyState(dict);
  const c10::IValue theirs = ListOf(dict, "param_groups");
  const StateDict state = dict.at("state");
  check_saved_groups(theirs);
  take(read(theirs, state));
}

// Throws unless saved groups are as many as ours, and have their keys.
void SamplerImpl::check_saved_groups(const c10::IValue& theirs) const {
  const size_t num_groups = theirs.toListRef().size();
  if (num_groups != groups().size()) {
    Invalid("Invalid state_dict: it has ", num_groups,
            " param groups, expected ", groups().size());
  }
  for (size_t i = 0; i < num_groups; ++i) {
    const StateDict group = DictAt(theirs, i, "param group");
    const StateDict ours = write_group(options_of(i), progress_, chain_, i);
    CheckGroupKeys(group, static_cast<int64_t>(i), ours);
    Names of_others;  // a user's own keys are left alone
    for (const auto& entry : group.entries()) {
      const std::string key = KeyText(entry.key());
      if (IsSetting(key) && !ours.contains(key)) of_others.insert(key);
    }
    if (!of_others.empty()) {
      Unknown("param group " + std::to_string(i), of_others, name());
    }
  }
}

SamplerImpl::Loaded SamplerImpl::read(const c10::IValue& theirs,
                                      const StateDict& state) const {
  Loaded loaded;
  std::vector<std::string> indices_of_all;
  std::vector<StateDict> written;
  for (size_t i = 0; i < groups().size(); ++i) {
    const StateDict group = DictAt(theirs, i, "param group");
    const auto indices = IntegersOf(group, "params");
    if (indices.size() != groups()[i].params().size()) {
      Invalid("Invalid state_dict: param group ", i, " has ", indices.size(),
              " parameters, expected ", groups()[i].params().size());
    }
    loaded.options.push_back(groups()[i].options().clone());
    OptionValues& options = OptionAccess::Of(*loaded.options.back());
    NamedValues progress = progress_;
    read_group(group, i, options, progress, loaded.chain);
    StateDict& values =
        written.emplace_back(write_group(options, progress, loaded.chain, i));
    for (const char* key : {"seed", "next_offset"}) {
      values.set(key, SavedCount({FromValue<int64_t>(key, group.at(key))}));
    }
    if (i == 0) loaded.progress = progress;
    read_means(state, i, indices, loaded.means);
    read_states(state, i, indices, CountAt(group, "step") == 0, loaded);
    for (const int64_t index : indices) {
      indices_of_all.push_back(std::to_string(index));
    }
  }
  CheckKnownKeys(state, indices_of_all, "its state", name());
  std::vector<std::string> equal = {"seed",       "step",      "next_offset",
                                    "capturable", "nonfinite", "num_skipped"};
  for (const auto& names : {shared_names(), loaded.progress.keys()}) {
    equal.insert(equal.end(), names.begin(), names.end());
  }
  CheckEqual(written, equal, why_equal());
  std::vector<std::vector<int64_t>> offsets;
  std::vector<std::vector<int64_t>> sizes;
  for (const GroupState& group : loaded.chain.groups) {
    for (const int64_t offset : group.offsets) CheckCount("offsets", offset);
    offsets.push_back(group.offsets);
    sizes.push_back(group.sizes);
  }
  CheckCount("next_offset", loaded.chain.next_offset);
  CheckRanges(offsets, sizes, loaded.chain.next_offset);
  return loaded;
}

// Reads the state of a group's parameters. Before the first step, what is not a
// user's is blank.
void SamplerImpl::read_states(const StateDict& state, size_t group,
                              const std::vector<int64_t>& indices,
                              bool is_blank, Loaded& loaded) const {
  const OptionValues& options = OptionAccess::Of(*loaded.options[group]);
  std::vector<std::string> keys = state_keys();
  keys.emplace_back("prior_mean");
  keys.emplace_back("step");  // in Python's, the groups' step
  for (size_t p = 0; p < indices.size(); ++p) {
    if (!state.contains(indices[p])) continue;
    const at::Tensor& param = groups()[group].params()[p];
    const StateDict kept = state.at(indices[p]);
    CheckKnownKeys(kept, keys,
                   "the state of parameter " + std::to_string(indices[p]),
                   name());
    size_t own = kept.size();
    for (const char* key : {"prior_mean", "step"}) {
      if (kept.contains(key)) --own;
    }
    auto restored = read_state(kept, param, indices[p], options);
    if (own == 0 || is_blank) continue;
    loaded.states.emplace_back(param.unsafeGetTensorImpl(),
                               std::move(restored));
  }
}

void SamplerImpl::take(Loaded loaded) {
  finite_check_ = DeferredFiniteCheck();  // of the chain that is left
  states().clear();
  for (auto& [param, restored] : loaded.states) {
    states()[param] = std::move(restored);
  }
  prior_means_ = std::move(loaded.means);
  progress_ = std::move(loaded.progress);
  for (size_t i = 0; i < groups().size(); ++i) {
    GroupState& own = loaded.chain.groups[i];
    for (const at::Tensor& param : groups()[i].params()) {
      own.has_means = own.has_means || prior_mean_of(param).defined();
    }
    OptionAccess::Of(*loaded.options[i]).means_are_kept = own.has_means;
    groups()[i].set_options(std::move(loaded.options[i]));
  }
  chain_ = std::move(loaded.chain);
  moved_.clear();
  OptionValues& made_of = OptionAccess::Of(owner_->defaults());
  made_of.share(options_of(0), {"capturable", "nonfinite"});
  parameters_changed();
}

// A parameter's saved state, on its device and of its state's dtype.
std::unique_ptr<SamplerParamState> SamplerImpl::read_state(
    const StateDict& kept, const at::Tensor& param, int64_t index,
    const OptionValues& options) const {
  auto state = std::make_unique<SamplerParamState>();
  for (const std::string& key : state_keys()) {
    if (!kept.contains(key)) continue;
    if (key == kNumGrads) {
      state->num_grads = FromValue<int64_t>("num_grads", kept.at(key));
      CheckCount("num_grads", *state->num_grads);
    } else {
      (*state)[key] = SavedTensor(kept, key.c_str(), param, index);
    }
  }
  const char* op = op_of(options);
  if (op != nullptr && !state->tensors().empty()) {
    for (const TensorListArg& list : OpSpecNamed(op).lists) {
      if (list.start == Start::kCustom || kept.contains(list.key)) continue;
      Invalid("Invalid state_dict: the state of parameter ", index, " lacks ",
              list.key);
    }
  }
  check_saved_state(*state, index);
  for (const auto& [key, value] : state->tensors()) {
    CheckFiniteState(key.c_str(), index, value);
  }
  // The chain may have been in lower precision.
  if (!HasMaster(param)) (*state)["master"] = at::Tensor();
  return state;
}

void SamplerImpl::read_group(const StateDict& saved, size_t index,
                             OptionValues& options, NamedValues& progress,
                             ChainState& chain) const {
  const Tensors& params = groups()[index].params();
  GroupState& own = chain.groups.emplace_back();
  own.offsets = IntegersOf(saved, "offsets");
  own.sizes = IntegersOf(saved, "sizes");
  GroupState now;
  now.number(params, chain_.num_chains, /*begin=*/0);
  own.params = std::move(now.params);
  if (own.sizes != now.sizes) {
    Invalid("Invalid state_dict: param group ", index,
            " was saved for parameters of other sizes (", Shape(own.sizes),
            ", expected ", Shape(now.sizes), ")");
  }
  const auto next = FromValue<int64_t>("next_offset", saved.at("next_offset"));
  const auto key = FromValue<int64_t>("seed", saved.at("seed"));
  options.read(saved);
  progress.read(saved);
  const int64_t steps = CountAt(saved, "step");
  const int64_t skipped = CountAt(saved, "num_skipped");
  own.records = ReadRecords(saved, options, op_);
  GroupRecords next_records = own.records;
  options.estimate_scale = FollowEstimate(next_records, options);
  check(options);
  check_progress(progress, options);
  for (const at::Tensor& param : params) {
    CheckParameter(name(), param, options.chains());
  }
  own.set_counters(steps, skipped, options.is_capturable(), params);
  if (index > 0) return;
  chain.next_offset = next;
  chain.seed = key;
  chain.capturable = options.is_capturable();
  chain.num_chains = chains_with_seeds(options);
}

void SamplerImpl::read_means(
    const StateDict& state, size_t group, const std::vector<int64_t>& indices,
    std::unordered_map<const void*, at::Tensor>& means) const {
  const Tensors& params = groups()[group].params();
  size_t having = 0;
  std::string lacking;
  Tensors still;
  for (size_t p = 0; p < indices.size(); ++p) {
    at::Tensor mean;
    if (state.contains(indices[p])) {
      mean = SavedTensor(state.at(indices[p]), "prior_mean", params[p],
                         indices[p]);
      if (mean.defined()) CheckFiniteState("prior_mean", indices[p], mean);
    }
    const std::string index = std::to_string(indices[p]);
    if (!mean.defined()) {
      // torch.distributed.checkpoint skips parameters without gradients.
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
  Invalid("Invalid state_dict: in param group ", group, " parameter ", lacking,
          " has no prior_mean, and others have");
}

}  // namespace torch_sgmcmc
