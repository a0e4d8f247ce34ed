// The CUDA drivers on the host: launch/cuda.cuh and launch/reduce.cuh with
// launches and threads turned into loops.
//
// What a thread does (launch/tables.h, launch/reduce.h) is the very code that
// the kernels call; only the launches are mirrored here.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "launch/chunks.h"
#include "launch/plan.h"
#include "launch/reduce.h"
#include "launch/tables.h"
#include "ops/nonfinite_op.h"
#include "random/counter.h"

namespace torch_sgmcmc::cuda_on_host {

template <class Update, class T>
void Launch(const Update& update, const SegmentTable& table,
            const NoiseStream& stream, int64_t blocks) {
  if (update.skips(stream.step)) return;
  const int64_t chains = std::max<int64_t>(1, table.num_chains);
  for (int64_t chain = 0; chain < chains; ++chain) {
    for (int64_t block = 0; block < blocks; ++block) {
      for (int thread = 0; thread < kThreads; ++thread) {
        UpdateThread<Update, T>(update, table, stream, block, chain, thread);
      }
    }
  }
}

template <class T, class Update>
void LaunchAll(const Update& update, const NoiseStream& stream,
               const std::vector<Segment>& segments, ScalarType dtype) {
  ForEachTable(segments, dtype, [&](const SegmentTable& table, int64_t blocks) {
    Launch<Update, T>(update, table, stream, blocks);
  });
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
    const Update<float> single(coefficients);
    const Update<double> twice(coefficients);
    if (!AddDeviceStep(device_step_, stream)) return;
    LaunchAll<double>(twice, stream, segments, ScalarType::Double);
    LaunchAll<float>(single, stream, segments, ScalarType::Float);
    LaunchAll<torch::headeronly::BFloat16>(single, stream, segments,
                                           ScalarType::BFloat16);
    LaunchAll<torch::headeronly::Half>(single, stream, segments,
                                       ScalarType::Half);
  }

 private:
  const Plan& plan_;
  const int64_t* device_step_;
};

// CountNonfinite of ops/nonfinite_cuda.cu.
template <class T>
void CountAll(const Plan& plan, ScalarType dtype, int64_t* counts) {
  ForEachTable(plan.segments(), dtype,
               [&](const SegmentTable& table, int64_t blocks) {
                 for (int64_t block = 0; block < blocks; ++block) {
                   for (int thread = 0; thread < kThreads; ++thread) {
                     int64_t place = 0;
                     const Nonfinite found =
                         CountThread<T>(table, block, thread, &place);
                     counts[place] += found.nans;
                     counts[place + 1] += found.infinities;
                   }
                 }
               });
}

inline std::vector<int64_t> CountNonfinite(const TensorList& tensors) {
  const Plan plan = PlanToCount("count_nonfinite", tensors);
  std::vector<int64_t> counts(2 * tensors.size());
  CountAll<double>(plan, ScalarType::Double, counts.data());
  CountAll<float>(plan, ScalarType::Float, counts.data());
  CountAll<torch::headeronly::BFloat16>(plan, ScalarType::BFloat16,
                                        counts.data());
  CountAll<torch::headeronly::Half>(plan, ScalarType::Half, counts.data());
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
    const auto run = [&](auto zero) {
      ReduceSegment<Map, decltype(zero)>(map, segments[i], all.cuts[i], to);
    };
    switch (segments[i].dtype) {
      case ScalarType::Double:
        run(double{});
        break;
      case ScalarType::BFloat16:
        run(torch::headeronly::BFloat16{});
        break;
      case ScalarType::Half:
        run(torch::headeronly::Half{});
        break;
      default:
        run(float{});
    }
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
    result.push_back(map.Finish(branches[0]));
  }
  return result;
}

}  // namespace torch_sgmcmc::cuda_on_host
