// Note [Rescaled momenta] in torch_sgmcmc/core/state.py.

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "libtorch/checks.h"
#include "libtorch/sampler_impl.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kMomenta = "momentum_settings";
constexpr const char* kEstimate = "noise_estimate_settings";

std::vector<double> Numbers(const MomentumSettings& s) {
  return {s.lr, s.temperature, s.num_data};
}

std::optional<std::vector<double>> ReadRecord(const StateDict& group,
                                              const char* key, size_t count) {
  const c10::IValue saved = group.at(key);
  if (saved.isNone()) return {};
  const auto record = FromValue<std::vector<double>>(key, saved);
  // Of a chain at its start, in Python.
  if (record == std::vector<double>(count)) return {};
  const auto is_finite = [](double number) { return std::isfinite(number); };
  if (record.size() != count || !std::ranges::all_of(record, is_finite) ||
      record[count - 3] <= 0 || record[count - 2] < 0 ||
      record[count - 1] <= 0) {
    Invalid("Invalid ", key, " in a state dict (must be None ", "or ", count,
            " finite numbers, with lr > 0, temperature >= 0 and num_data > 0)");
  }
  return record;
}

MomentumSettings LastThree(const std::vector<double>& record) {
  const size_t end = record.size();
  return {record[end - 3], record[end - 2], record[end - 1]};
}

MomentumSettings MomentumSettingsOf(const OptionValues& options) {
  return {options.lr(), options.temperature(), options.num_data()};
}

// True if the momenta belong to other settings.
bool HasChanged(const GroupRecords& records, const OptionValues& options) {
  return options.lr() > 0 &&
         (!records.momenta || *records.momenta != MomentumSettingsOf(options));
}

// The factor for the momenta of all parameters; none if they are drawn.
std::optional<double> ScaleOf(const MomentumSettings& from,
                              const MomentumSettings& to,
                              const Tensors& params) {
  const bool in_double = std::ranges::all_of(params, [](const at::Tensor& p) {
    return p.scalar_type() == at::kDouble;
  });
  return in_double ? MomentumScale<double>(from, to)
                   : MomentumScale<float>(from, to);
}

// True if new momenta are drawn, as after T = 0.
bool IsDrawn(const GroupRecords& records, const OptionValues& options,
             const Tensors& params) {
  return records.momenta && HasChanged(records, options) &&
         !ScaleOf(*records.momenta, MomentumSettingsOf(options), params);
}

}  // namespace

std::vector<std::string> RecordKeys(const OptionValues& options,
                                    const char* op) {
  std::vector<std::string> keys;
  // A direction has length 1 whatever the settings.
  const bool has_momenta =
      op != nullptr &&
      std::ranges::count(KeysOf(OpSpecNamed(op)), "momentum") > 0;
  for (const std::string& key : options.keys()) {
    if (key == "momentum" && has_momenta) keys.emplace_back(kMomenta);
    if (key == "noise_estimate") keys.emplace_back(kEstimate);
  }
  return keys;
}

Scales ScalesOf(const GroupRecords& records, const OptionValues& options,
                const Tensors& params) {
  if (!records.momenta || !HasChanged(records, options)) return {};
  const MomentumSettings& from = *records.momenta;
  const MomentumSettings to = MomentumSettingsOf(options);
  // A ratio above 1 would multiply a thermostat's fluctuations beyond the
  // friction.
  return {ScaleOf(from, to, params).value_or(1),
          std::min(1.0, NoiseEstimateScale(from, to))};
}

double FollowEstimate(GroupRecords& records, const OptionValues& options) {
  const double given = options.number_or("noise_estimate", 0);
  if (given == 0 || std::isnan(given)) {
    records.estimate.reset();
    return 1;
  }
  const MomentumSettings now = MomentumSettingsOf(options);
  if (now.lr == 0) return 1;
  if (!records.estimate || records.estimate->value != given) {
    if (now.temperature > 0) records.estimate = {given, now};
    return 1;
  }
  const MomentumSettings& from = records.estimate->settings;
  if (now == from || now.temperature == 0) return 1;
  return NoiseEstimateScale(from, now);
}

void WriteRecords(const GroupRecords& records, const OptionValues& options,
                  const char* op, StateDict& group) {
  for (const std::string& key : RecordKeys(options, op)) {
    std::optional<std::vector<double>> record;
    if (key == kMomenta && records.momenta) {
      record = Numbers(*records.momenta);
    } else if (key == kEstimate && records.estimate) {
      record = Numbers(records.estimate->settings);
      record->insert(record->begin(), records.estimate->value);
    }
    group.set(key, record ? ToValue(*record) : c10::IValue());
  }
}

GroupRecords ReadRecords(const StateDict& group, const OptionValues& options,
                         const char* op) {
  GroupRecords records;
  for (const std::string& key : RecordKeys(options, op)) {
    const bool of_momenta = key == kMomenta;
    const auto record = ReadRecord(group, key.c_str(), of_momenta ? 3 : 4);
    if (!record) continue;
    if (of_momenta) {
      records.momenta = LastThree(*record);
    } else {
      records.estimate = {(*record)[0], LastThree(*record)};
    }
  }
  return records;
}

bool SamplerImpl::rests() const {
  for (size_t group = 0; group < groups().size(); ++group) {
    if (options_of(group).lr() != 0) return false;
  }
  return !groups().empty();
}

// Draws the momenta of groups whose T is no longer 0; in place if a CUDA graph
// may use them.
void SamplerImpl::redraw_momenta() {
  for (size_t g = 0; g < groups().size(); ++g) {
    const OptionValues& options = options_of(g);
    const GroupState& own = chain_.groups[g];
    const auto& params = groups()[g].params();
    if (!IsDrawn(own.records, options, params)) continue;
    for (size_t i = 0; i < params.size(); ++i) {
      if (!state_of(params[i])["momentum"].defined()) continue;
      TensorLists one = begin_lists(g, params[i].is_cuda(), {});
      one.params = {params[i]};
      one.offsets = {own.offsets[i]};
      at::Tensor drawn;
      StartState(one, {&drawn}, start_of_momenta(options));
      at::Tensor& momentum = own_state_of(params[i])["momentum"];
      if (chain_.capturable) {
        momentum.copy_(drawn);
      } else {
        momentum = drawn;
      }
    }
  }
}

// Multiplies momenta and thermostats of a group, except updated parameters'.
void SamplerImpl::multiply_state(size_t group, const Scales& scales,
                                 const std::vector<TensorLists>& updated) {
  for (const at::Tensor& param : groups()[group].params()) {
    const bool is_updated =
        std::ranges::any_of(updated, [&](const TensorLists& lists) {
          return std::ranges::any_of(lists.params, [&](const at::Tensor& p) {
            return p.is_same(param);
          });
        });
    if (is_updated || !state_of(param)["momentum"].defined()) continue;
    SamplerParamState& state = own_state_of(param);
    if (scales.momentum != 1) state["momentum"].mul_(scales.momentum);
    if (scales.thermostat != 1 && state_of(param)["thermostat"].defined()) {
      state["thermostat"].mul_(scales.thermostat);
    }
  }
}

// Rescales state of parameters that were not updated, and sets the records.
void SamplerImpl::finish_rescaling(const std::vector<TensorLists>& lists) {
  for (size_t g = 0; g < groups().size(); ++g) {
    GroupRecords& records = chain_.groups[g].records;
    const OptionValues& options = options_of(g);
    if (!HasChanged(records, options)) continue;
    if (records.momenta) {
      multiply_state(g, ScalesOf(records, options, groups()[g].params()),
                     lists);
    }
    if (!finite_check_.pending.empty()) {
      // The device may have skipped the step.
      finite_check_.undo.emplace_back(g, records.momenta);
    }
    records.momenta = MomentumSettingsOf(options);
  }
}

// For capturable samplers: the host does not know of skipped steps.
void SamplerImpl::rescale_now(std::vector<TensorLists>& lists) {
  redraw_momenta();
  for (size_t g = 0; g < groups().size(); ++g) {
    GroupRecords& records = chain_.groups[g].records;
    const OptionValues& options = options_of(g);
    if (!records.momenta || !HasChanged(records, options)) continue;
    multiply_state(g, ScalesOf(records, options, groups()[g].params()), {});
    records.momenta = MomentumSettingsOf(options);
  }
  for (TensorLists& each : lists) {
    each.momentum_scale = each.thermostat_scale = 1;
  }
}

bool SamplerImpl::leaves_momenta(const std::vector<TensorLists>& lists) const {
  size_t updated = 0;
  for (const TensorLists& each : lists) updated += each.params.size();
  size_t all = 0;
  bool any = false;
  for (size_t g = 0; g < groups().size(); ++g) {
    any = any || HasChanged(chain_.groups[g].records, options_of(g));
    all += groups()[g].params().size();
  }
  return any && updated < all;
}

}  // namespace torch_sgmcmc
