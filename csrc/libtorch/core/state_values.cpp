#include "libtorch/core/state_values.h"

#include <ATen/ATen.h>

#include "libtorch/core/checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {

c10::IValue OrNone(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

std::vector<c10::IValue> ListAt(const StateDict& dict, const char* name) {
  const c10::IValue value = dict.at(name);
  if (!value.isList()) {
    Invalid(std::string("Invalid state_dict: ") + name + " is a " +
            KindOf(value) + " (must be a list)");
  }
  return value.toList().vec();
}

}  // namespace torch_sgmcmc
