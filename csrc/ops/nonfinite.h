// Finds elements that are not finite, shared by CPU and CUDA, by their bits:
// without arithmetic, no compiler flag or processor mode can hide one.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <limits>

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

}  // namespace torch_sgmcmc
