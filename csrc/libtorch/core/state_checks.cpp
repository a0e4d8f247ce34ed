#include "libtorch/core/state_checks.h"

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>
#include <utility>

#include "libtorch/core/checks.h"
#include "libtorch/core/parameters.h"
#include "libtorch/core/tensor_lists.h"

namespace torch_sgmcmc {
namespace {

using Names = std::set<std::string>;  // sorted, as messages list them

std::string InARow(const Names& names) {
  std::string row;
  for (const std::string& name : names) {
    row += (row.empty() ? "" : ", ") + name;
  }
  return row;
}

[[noreturn]] void Unknown(const std::string& where,
                          const Names& keys,
                          const std::string& sampler) {
  Invalid("Invalid state_dict: " + where + " has " + InARow(keys) + ", which " +
          sampler + " does not know; it is not one of " + sampler);
}

// NOLINTNEXTLINE(misc-no-recursion): as deep as what is shown.
std::string TextOf(const c10::IValue& value) {
  if (value.isNone()) return "none";
  if (value.isBool()) return value.toBool() ? "true" : "false";
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isString()) return Shown(value.toStringRef());
  if (value.isDouble()) return Shown(value.toDouble());
  if (value.isTensor()) {
    return std::to_string(value.toTensor().item<int64_t>());
  }
  std::string text;
  for (const c10::IValue& element : value.toList().vec()) {
    text += (text.empty() ? "" : ", ") + TextOf(element);
  }
  return "[" + text + "]";
}

}  // namespace

bool Alike(const c10::IValue& a, const c10::IValue& b) {
  if (a.isList() && b.isList()) {
    const auto x = a.toList().vec();
    const auto y = b.toList().vec();
    return x.size() == y.size() &&
           std::equal(x.begin(), x.end(), y.begin(), Alike);
  }
  if (a.isTensor() && b.isTensor()) {
    return a.toTensor().item<int64_t>() == b.toTensor().item<int64_t>();
  }
  if (a.isDouble() && b.isDouble() && std::isnan(a.toDouble())) {
    return std::isnan(b.toDouble());
  }
  return a == b;
}

void RefusePythonsAlone(const StateDict& dict) {
  const auto refuse = [](const std::string& kind) {
    Invalid("Invalid state dict: got one of " + kind +
            ", which C++ does not have. Continue it in Python");
  };
  constexpr std::pair<const char*, const char*> kByKey[] = {
      {"full_grads", "ControlVariates or SVRG"},
      {"series", "Gauges"},
      {"means", "TimeAverage"}};
  for (const auto& [key, kind] : kByKey) {
    if (dict.contains(key)) refuse(kind);
  }
  // What is of another type is none of them, and refused where it is read.
  if (dict.contains("param_groups") && dict.at("param_groups").isList()) {
    for (const c10::IValue& value : dict.at("param_groups").toList().vec()) {
      if (!value.isGenericDict()) continue;
      const StateDict group = value;
      const auto has = [&](const char* key, const c10::IValue& wanted) {
        return group.contains(key) && Alike(group.at(key), wanted);
      };
      for (const char* name : {"HMC", "HMCECS"}) {
        if (has("sampler", name)) refuse(name);
      }
      if (has("gamma", true)) refuse("PSGLD with Γ");
      if (has("persistent_index_chain", true)) {
        refuse("EWSG with a persistent index chain");
      }
    }
  }
  if (!dict.contains("state") || !dict.at("state").isGenericDict()) return;
  const StateDict states = dict.at("state");
  for (const auto& entry : states.entries()) {
    if (entry.value().isGenericDict() &&
        StateDict(entry.value()).contains("sensitivity")) {
      refuse("PSGLD with Γ");
    }
  }
}

void CheckGroupKeys(const StateDict& group,
                    int64_t index,
                    const StateDict& ours) {
  const std::string wanted = ours.at("sampler").toStringRef();
  if (group.contains("sampler") && !Alike(group.at("sampler"), wanted)) {
    const c10::IValue name = group.at("sampler");
    Invalid("Invalid state dict: got one of " +
            (name.isString() ? name.toStringRef() : "a " + KindOf(name)) +
            " (must be of " + wanted +
            "). Load it into a sampler of its class");
  }
  Names missing;
  for (const auto& entry : ours.entries()) {
    const std::string key = entry.key().toStringRef();
    if (!group.contains(key)) missing.insert(key);
  }
  if (missing.empty()) return;
  Invalid("Invalid state_dict: param group " + std::to_string(index) +
          " lacks " + InARow(missing) + "; it is not one of " + wanted);
}

void CheckKnownKeys(const StateDict& dict,
                    const std::vector<std::string>& known,
                    const std::string& where,
                    const char* sampler) {
  Names unknown;
  for (const auto& entry : dict.entries()) {
    const c10::IValue& saved = entry.key();
    const std::string key = saved.isInt() ? std::to_string(saved.toInt())
                            : saved.isString()
                                ? saved.toStringRef()
                                : "a key that is a " + KindOf(saved);
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      unknown.insert(key);
    }
  }
  if (!unknown.empty()) Unknown(where, unknown, sampler);
}

void CheckEqual(const std::vector<StateDict>& groups,
                const std::vector<std::string>& keys,
                const char* why) {
  if (groups.size() == 1) return;
  for (const std::string& key : keys) {
    bool equal = true;
    std::string text;
    for (const StateDict& group : groups) {
      equal = equal && Alike(group.at(key), groups[0].at(key));
      if (!text.empty()) text += ", ";
      text += TextOf(group.at(key));
    }
    if (equal) continue;
    // NOLINTNEXTLINE(performance-inefficient-string-concatenation): it throws.
    Invalid("Invalid " + key + ": [" + text +
            "] in the param groups (must be equal: " + why + ")");
  }
}

void CheckPart(const char* name,
               int64_t count,
               const char* whole,
               int64_t most) {
  CheckCount(name, count);
  CheckCount(whole, most);
  if (count <= most) return;
  Invalid(std::string("Invalid ") + name + ": " + std::to_string(count) +
          " (must be at most " + whole + " = " + std::to_string(most) + ")");
}

void CheckFiniteState(const char* name,
                      int64_t index,
                      const at::Tensor& value) {
  if (value.isfinite().all().item<bool>()) return;
  Invalid("Invalid state_dict: " + std::string(name) + " of parameter " +
          std::to_string(index) + " has elements that are not finite");
}

void CheckTensor(const std::string& what,
                 const c10::IValue& value,
                 c10::IntArrayRef shape,
                 std::optional<at::ScalarType> dtype) {
  const std::string invalid = "Invalid state_dict: " + what;
  if (!value.isTensor() || !value.toTensor().defined()) {
    Invalid(invalid + " is a " + KindOf(value) + " (must be a Tensor)");
  }
  const at::Tensor& tensor = value.toTensor();
  if (dtype ? tensor.scalar_type() != *dtype : !tensor.is_floating_point()) {
    Invalid(invalid + " is of " + DtypeName(tensor.scalar_type()) +
            " (must be " + (dtype ? DtypeName(*dtype) : "floating point") +
            ")");
  }
  if (tensor.layout() != at::kStrided || tensor.is_meta()) {
    Invalid(invalid + " has the layout " + LayoutName(tensor.layout()) +
            " on the device " + tensor.device().str() +
            " (must be torch::kStrided, with numbers)");
  }
  if (tensor.sizes() != shape) {
    Invalid(invalid + " has shape " + Shape(tensor.sizes()) + ", expected " +
            Shape(shape));
  }
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

}  // namespace torch_sgmcmc
