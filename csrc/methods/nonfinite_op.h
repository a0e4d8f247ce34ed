// torch_sgmcmc::any_nonfinite, count_nonfinite and step_or_nothing: what they
// have in common
// on all devices.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "methods/nonfinite.h"

namespace torch_sgmcmc {

inline Plan PlanToCount(const char* op, const TensorList& tensors) {
  if (tensors.empty()) Fail(op, "tensors is empty");
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < tensors.size(); ++i) {
    offsets.push_back(static_cast<int64_t>(i * kOffsetOfNext));
  }
  return Plan(op, {{"tensors", Role::kGradient, tensors}}, offsets);
}

inline Tensor NoCounts(const TensorList& tensors) {
  return torch::stable::new_zeros(
      tensors[0], {static_cast<int64_t>(tensors.size()), 2}, ScalarType::Long);
}

// Checks the arguments of step_or_nothing. The result is on the counts' device.
inline const int64_t* CheckedDeviceStep(
    const Tensor& counts,
    int64_t step,
    const std::optional<Tensor>& device_step) {
  constexpr const char* kOp = "step_or_nothing";
  if (!counts.defined() || counts.scalar_type() != ScalarType::Long ||
      !counts.is_contiguous()) {
    Fail(kOp, "counts must be contiguous and of int64");
  }
  MakeStream(kOp, /*seed=*/0, step, /*purpose=*/int64_t{0});
  return DeviceStep(
      kOp, counts.is_cuda(), counts.get_device_index(), device_step);
}

}  // namespace torch_sgmcmc
