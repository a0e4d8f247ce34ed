// Where a CUDA thread works: block -> segment -> chunk -> quad -> elements.
//
// The CUDA driver's index arithmetic, as functions for host and device that CPU
// tests run. A thread handles quads, the four elements of one Philox block.
// Quads are aligned in the element numbering: with an offset that is not a
// multiple of four, a segment's first and last quad are incomplete.
#pragma once

#include <cstdint>

#include "random/macros.h"

namespace torch_sgmcmc {

constexpr int kThreads = 256;
constexpr int kQuadsPerThread = 4;
constexpr int64_t kQuadsPerChunk = int64_t{kThreads} * kQuadsPerThread;

// The part of a quad that lies inside a segment.
struct QuadSpan {
  uint64_t quad;   // number of the quad in the noise stream
  int64_t origin;  // position in the segment of the quad's word 0; may be < 0
  int begin;       // words [begin, end) of the quad lie inside
  int end;
};

// Quads touched by a segment of numel elements from an element offset on.
SG_INLINE int64_t QuadCount(int64_t numel, uint64_t offset) {
  if (numel == 0) return 0;
  const uint64_t last = offset + static_cast<uint64_t>(numel) - 1;
  return static_cast<int64_t>(last / 4 - offset / 4 + 1);
}

SG_INLINE int64_t ChunkCount(int64_t numel, uint64_t offset) {
  return (QuadCount(numel, offset) + kQuadsPerChunk - 1) / kQuadsPerChunk;
}

// The quad of thread `thread` in its `k`-th turn at a chunk. Consecutive
// threads take consecutive quads. Empty (begin == end) past the segment's end.
SG_INLINE QuadSpan SpanOf(int64_t numel, uint64_t offset, int64_t chunk,
                          int thread, int k) {
  // cppcheck-suppress redundantAssignment
  const int64_t index = chunk * kQuadsPerChunk + int64_t{k} * kThreads + thread;
  const int64_t origin = index * 4 - static_cast<int64_t>(offset % 4);
  QuadSpan span{offset / 4 + static_cast<uint64_t>(index), origin, 0, 0};
  if (origin >= numel) return span;
  span.begin = origin < 0 ? static_cast<int>(-origin) : 0;
  span.end = numel - origin < 4 ? static_cast<int>(numel - origin) : 4;
  return span;
}

// Position of the last entry of the ascending array first[0, count) that is not
// greater than `block`: the segment to which a thread block belongs.
SG_INLINE int SegmentOf(const int64_t* first, int count, int64_t block) {
  int low = 0;
  int high = count;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (first[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace torch_sgmcmc
