// What autograd, and whoever looks, knows of a tensor's having been written to.
// Operators are opaque to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>

namespace torch_sgmcmc {

// Differs if the tensor was written to in between. An inference tensor counts
// nothing: then it always differs.
inline int64_t VersionOf(const at::Tensor& tensor) {
  static std::atomic<int64_t> unknown = 0;
  return tensor.is_inference() ? --unknown
                               : static_cast<int64_t>(tensor._version());
}

// Says that an operator changed these.
inline void BumpVersions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace torch_sgmcmc
