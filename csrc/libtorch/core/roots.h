// Square roots that are the same on every processor:
// torch_sgmcmc/chain/roots.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include "libtorch/core/operators.h"

namespace torch_sgmcmc {

inline at::Tensor Root(const at::Tensor& tensor) {
  at::Tensor roots = tensor.detach().clone();
  square_root_({roots});
  return roots;
}

}  // namespace torch_sgmcmc
