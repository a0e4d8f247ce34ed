// Finds elements that are not finite, shared by CPU and CUDA, by their bits:
// without arithmetic, no compiler flag or processor mode can hide one.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "launch/plan.h"
#include "launch/tables.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// A type's bits as a signed integer, which vector units compare, and the bits
// of infinity. The integers may alias the numbers.
template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Type = int32_t __attribute__((may_alias));
  static constexpr int32_t kInfinity = 0x7F800000;
};
template <>
struct BitsOf<double> {
  using Type = int64_t __attribute__((may_alias));
  static constexpr int64_t kInfinity = 0x7FF0000000000000;
};
template <>
struct BitsOf<torch::headeronly::BFloat16> {
  using Type = int16_t __attribute__((may_alias));
  static constexpr int16_t kInfinity = 0x7F80;
};
template <>
struct BitsOf<torch::headeronly::Half> {
  using Type = int16_t __attribute__((may_alias));
  static constexpr int16_t kInfinity = 0x7C00;
};

// Without the sign: NaN's are above infinity's.
template <class Bits>
SG_INLINE Bits Magnitude(Bits bits) {
  constexpr Bits kAllButSign = std::numeric_limits<Bits>::max();
  return static_cast<Bits>(bits & kAllButSign);
}

struct Nonfinite {
  int64_t nans = 0;
  int64_t infinities = 0;
};

// Elements 2 i and 2 i + 1 of the result are tensor i's NaNs and infinities.
// Plans identify tensors by offsets, multiples of four for a GPU's quads.
constexpr uint64_t kOffsetOfNext = 4;

SG_INLINE int64_t PlaceOfCounts(uint64_t offset) {
  return static_cast<int64_t>(offset / kOffsetOfNext * 2);
}

// A GPU thread's counts: every kThreads-th element of its block's chunk.
template <class T>
SG_INLINE Nonfinite CountThread(const SegmentTable& table, int64_t block,
                                int thread, int64_t* place) {
  using Bits = typename BitsOf<T>::Type;
  constexpr int64_t kChunk = kQuadsPerChunk * 4;
  const int s = SegmentOf(table.first_chunk, table.count, block);
  const Bits* data = static_cast<const Bits*>(table.data[0][s]);
  const int64_t begin = (block - table.first_chunk[s]) * kChunk;
  const int64_t end =
      begin + kChunk < table.numel[s] ? begin + kChunk : table.numel[s];
  Nonfinite counts;
  for (int64_t i = begin + thread; i < end; i += kThreads) {
    const auto size = Magnitude(data[i]);
    counts.nans += size > BitsOf<T>::kInfinity;
    counts.infinities += size == BitsOf<T>::kInfinity;
  }
  *place = PlaceOfCounts(table.offset[s]);
  return counts;
}

// True if a count is not 0, among those of one thread of `threads`.
SG_INLINE bool AnyCount(const int64_t* counts, int64_t size, int thread,
                        int threads) {
  bool any = false;
  for (int64_t i = thread; i < size; i += threads) any = any || counts[i] != 0;
  return any;
}

// ---- The common part of any_nonfinite, count_nonfinite, step_or_nothing and
// step_if_finite.

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
