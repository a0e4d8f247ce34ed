// What a state dict must be for a sampler to load it:
// torch_sgmcmc/chain/state_checks.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

// Throws if a state dict is of what Python alone has.
void RefusePythonsAlone(const StateDict& dict);

// Throws if a saved group is of another class than ours, or lacks a key.
void CheckGroupKeys(const StateDict& group,
                    int64_t index,
                    const StateDict& ours);

// Throws if a dict has a key that is none of these; `where` names the dict.
void CheckKnownKeys(const StateDict& dict,
                    const std::vector<std::string>& known,
                    const std::string& where,
                    const char* sampler);

// Throws unless the values of these keys are equal in all groups.
void CheckEqual(const std::vector<StateDict>& groups,
                const std::vector<std::string>& keys,
                const char* why);

// Whether values are equal, where NaN is like NaN.
bool Alike(const c10::IValue& a, const c10::IValue& b);

// Throws unless one count is a part of another one.
void CheckPart(const char* name,
               int64_t count,
               const char* whole,
               int64_t most);

// Throws unless all elements of a parameter's state are finite.
void CheckFiniteState(const char* name, int64_t index, const at::Tensor& value);

// Throws std::runtime_error unless state has its parameter's shape and device
// and the type of state; what is undefined is not there.
void CheckFit(const char* name,
              const at::Tensor& value,
              const at::Tensor& param,
              const char* sampler);

// Throws unless it is a tensor of this shape and type, or of some float type.
void CheckTensor(const std::string& what,
                 const c10::IValue& value,
                 c10::IntArrayRef shape,
                 std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace torch_sgmcmc
