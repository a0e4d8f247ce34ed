// The common part of any_nonfinite, count_nonfinite, step_or_nothing and
// step_if_finite.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/plan.h"
#include "ops/nonfinite.h"

namespace torch_sgmcmc {

inline Plan PlanToCount(const char* op, const TensorList& tensors,
                        const char* name = "tensors") {
  if (tensors.empty()) Fail(op, name, " is empty");
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < tensors.size(); ++i) {
    offsets.push_back(static_cast<int64_t>(i * kOffsetOfNext));
  }
  return Plan(op, {{name, Role::kGradient, tensors}}, offsets);
}

inline Tensor NoCounts(const TensorList& tensors) {
  return torch::stable::new_zeros(
      tensors[0], {static_cast<int64_t>(tensors.size()), 2}, ScalarType::Long);
}

inline void CheckCounts(const char* op, const Tensor& counts) {
  if (!counts.defined() || counts.scalar_type() != ScalarType::Long ||
      !counts.is_contiguous()) {
    Fail(op, "counts must be contiguous and of int64");
  }
}

// Counts a made or skipped step on the device.
SG_INLINE void CountStep(bool any, int64_t* step, int64_t* num_skipped) {
  int64_t* count = any && num_skipped != nullptr ? num_skipped : step;
  ++*count;
}

// On the CPU.
bool AnyNonfiniteOf(const char* op, const TensorList& tensors,
                    const char* name = "tensors");
Tensor CountNonfiniteOf(const char* op, const TensorList& tensors,
                        const char* name = "tensors");

// Checks a step on a tensor's device.
inline const int64_t* CheckedDeviceStep(
    const char* op, const Tensor& like, int64_t step,
    const std::optional<Tensor>& device_step) {
  MakeStream(op, /*seed=*/0, step, /*purpose=*/int64_t{0});
  return DeviceStep(op, like.is_cuda(), like.get_device_index(), device_step);
}

}  // namespace torch_sgmcmc
