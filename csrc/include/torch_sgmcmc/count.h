// What a sampler counts, on the host or on a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>

#include "torch_sgmcmc/export.h"

namespace torch_sgmcmc {

/// A count; on a device it is an int64 scalar, for which nobody has waited yet.
struct TORCH_SGMCMC_API Count {
  int64_t host = 0;        // unless it is on a device
  at::Tensor device = {};  // undefined on the host

  bool is_on_device() const { return device.defined(); }
  /// Waits for the device.
  int64_t get() const { return is_on_device() ? device.item<int64_t>() : host; }
  /// In place, on the device too.
  void add(int64_t more) {
    if (is_on_device()) {
      device.add_(more);
    } else {
      host += more;
    }
  }
  /// For a state dict, which shares the scalar.
  c10::IValue saved() const {
    return is_on_device() ? c10::IValue(device) : c10::IValue(host);
  }
  bool operator==(const Count& other) const { return get() == other.get(); }
};

}  // namespace torch_sgmcmc
