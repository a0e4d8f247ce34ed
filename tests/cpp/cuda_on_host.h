// The CUDA drivers on the host: launch/cuda.cuh and launch/reduce.cuh with
// launches and threads turned into loops.
//
// What a thread does (launch/tables.h, launch/reduce.h) is the very code that
// the kernels call; only the launches are mirrored here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "launch/chunks.h"
#include "launch/plan.h"
#include "launch/reduce.h"
#include "launch/tables.h"
#include "ops/nonfinite.h"
#include "random/counter.h"

namespace torch_sgmcmc::cuda_on_host {

template <class Update, class T>
void Launch(const Update& update, const SegmentTable& table,
            const NoiseStream& stream, int64_t blocks) {
  if (Skips(update, stream.step)) return;
  const int64_t chains = std::max<int64_t>(1, table.num_chains);
  for (int64_t chain = 0; chain < chains; ++chain) {
    for (int64_t block = 0; block < blocks; ++block) {
      for (int thread = 0; thread < kThreads; ++thread) {
        UpdateThread<Update, T>(update, table, stream, block, chain, thread);
      }
    }
  }
}

// Stands in for CudaDriver, so that whole operators can run on it.
class Driver {
 public:
  Driver(const char* op, const Plan& plan,
         const std::optional<Tensor>& device_step)
      : plan_(plan), device_step_(DeviceStep(op, plan, device_step)) {}

  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients, NoiseStream stream) const {
    Apply<Update>(coefficients, stream, plan_.segments());
  }

  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients, NoiseStream stream,
             const std::vector<Segment>& segments) const {
    const BothTypes<Update> updates(coefficients);
    if (!AddDeviceStep(device_step_, stream)) return;
    ForEachTable(segments,
                 [&](auto element, const SegmentTable& table, int64_t blocks) {
                   using T = decltype(element);
                   Launch<Update<Arithmetic<T>>, T>(updates.template For<T>(),
                                                    table, stream, blocks);
                 });
  }

 private:
  const Plan& plan_;
  const int64_t* device_step_;
};

// CountNonfinite of ops/nonfinite_cuda.cu.
inline std::vector<int64_t> CountNonfinite(const TensorList& tensors) {
  const Plan plan = PlanToCount("count_nonfinite", tensors);
  std::vector<int64_t> counts(2 * tensors.size());
  ForEachTable(plan.segments(),
               [&](auto element, const SegmentTable& table, int64_t blocks) {
                 for (int64_t block = 0; block < blocks; ++block) {
                   for (int thread = 0; thread < kThreads; ++thread) {
                     int64_t place = 0;
                     const Nonfinite found = CountThread<decltype(element)>(
                         table, block, thread, &place);
                     counts[place] += found.nans;
                     counts[place + 1] += found.infinities;
                   }
                 }
               });
  return counts;
}

// GateKernel.
inline int64_t StepOrNothing(const std::vector<int64_t>& counts, int64_t step,
                             const int64_t* device_step) {
  bool any = false;
  for (int thread = 0; thread < kThreads; ++thread) {
    any = AnyCount(counts.data(), static_cast<int64_t>(counts.size()), thread,
                   kThreads) ||
          any;
  }
  return GatedStep(any, step, device_step);
}

// The kernels of launch/reduce.cuh.
template <class Map, class T>
void ReduceSegment(const Map& map, const Segment& segment, const Cut& cut,
                   const StretchSums& to) {
  constexpr size_t kCount = kSums<Map>;
  for (int64_t unit = 0; unit < cut.units; ++unit) {
    const Unit u = UnitAt(cut, to.per_chain, unit);
    double lanes[kCount][kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Terms<Map> sums =
          LaneSums<Map, T>(map, segment.data, u.begin, u.end, lane);
      for (size_t k = 0; k < kCount; ++k) lanes[k][lane] = sums[k];
    }
    for (size_t k = 0; k < kCount; ++k) {
      to.sums[static_cast<int64_t>(k) * to.targets + u.target] =
          AddLanes(lanes[k]);
    }
  }
}

template <class Map>
std::vector<double> Reduce(const Map& map, const std::vector<Segment>& segments,
                           int64_t num_chains) {
  const Cuts all(segments, num_chains);
  const int64_t targets = num_chains * all.per_chain;
  std::vector<double> sums(kSums<Map> * static_cast<size_t>(targets));
  const StretchSums to{sums.data(), targets, all.per_chain};
  for (size_t i = 0; i < segments.size(); ++i) {
    WithElement(segments[i].dtype, [&](auto element) {
      ReduceSegment<Map, decltype(element)>(map, segments[i], all.cuts[i], to);
    });
  }
  std::vector<double> result;
  for (size_t row = 0; row < kSums<Map> * static_cast<size_t>(num_chains);
       ++row) {
    double branches[kBranches];
    for (int b = 0; b < kBranches; ++b) {
      branches[b] =
          BranchSum(sums.data() + static_cast<int64_t>(row) * all.per_chain,
                    all.per_chain, b);
    }
    for (int width = kBranches / 2; width > 0; width /= 2) {
      for (int b = 0; b < width; ++b) branches[b] += branches[b + width];
    }
    result.push_back(Finish(map, branches[0]));
  }
  return result;
}

}  // namespace torch_sgmcmc::cuda_on_host
