// Cuts segments into stretches at fixed places and spreads them over threads;
// and the innermost CPU loop of updates, for drivers (launch/cpu.h) and for
// sums that are taken in the same pass (launch/reduce.h).
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/plan.h"
#include "ops/roles.h"
#include "random/isa.h"
#include "random/macros.h"

#define SG_EACH_ISA "launch/elements.inl"
#include "random/each_isa.inl"

namespace torch_sgmcmc {

// The unit of scheduling, in elements: a multiple of the noise block that
// balances two threads over 10^5 weights.
constexpr int64_t kStretch = 4096;
// Fewest stretches of a thread: below 10 us of work a second one does not pay.
constexpr int64_t kGrain = 4;

// Segments of one chain each, in `storage` if they had several.
inline const std::vector<Segment>& Apart(const std::vector<Segment>& segments,
                                         std::vector<Segment>& storage) {
  if (segments.empty() || segments[0].num_chains == 0) return segments;
  for (const Segment& s : segments) {
    for (int64_t k = 0; k < s.num_chains; ++k) {
      storage.push_back(OfChain(s, k));
    }
  }
  return storage;
}

// Calls run(segment, begin, end) on ranges that cover all segments; each begins
// at a multiple of kStretch.
void ParallelOverStretches(const std::vector<Segment>& segments,
                           const auto& run, int64_t grain = kGrain) {
  std::vector<int64_t> first_stretch(segments.size() + 1, 0);
  for (size_t i = 0; i < segments.size(); ++i) {
    first_stretch[i + 1] =
        first_stretch[i] + (segments[i].numel + kStretch - 1) / kStretch;
  }
  const auto work = [&](int64_t begin, int64_t end) {
    size_t i = static_cast<size_t>(
        std::upper_bound(first_stretch.begin(), first_stretch.end(), begin) -
        first_stretch.begin() - 1);
    while (begin < end) {
      const Segment& s = segments[i];
      const int64_t stop = std::min(end, first_stretch[i + 1]);
      run(s, (begin - first_stretch[i]) * kStretch,
          std::min(s.numel, (stop - first_stretch[i]) * kStretch));
      begin = stop;
      ++i;
    }
  };
  torch::stable::parallel_for(0, first_stretch.back(), grain, work);
}

}  // namespace torch_sgmcmc
