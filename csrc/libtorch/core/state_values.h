// Values of the dicts and lists in state dicts.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "torch_sgmcmc/options.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

template <typename T>
c10::IValue ListOfValues(const std::vector<T>& values) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const T& value : values) list.push_back(value);
  return list;
}

template <typename T>
T ValueAt(const StateDict& dict, const char* name) {
  T result{};
  detail::FromValue(name, dict.at(name), result);
  return result;
}

// Throws unless it is a list.
std::vector<c10::IValue> ListAt(const StateDict& dict, const char* name);

// None for an undefined tensor.
c10::IValue OrNone(const at::Tensor& tensor);

}  // namespace torch_sgmcmc
