// The reduction of launch/reduce.h on a GPU, in the same order: a thread per
// lane of a stretch, of which one adds the lanes, then a block per sum of a
// chain.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "launch/cuda.cuh"
#include "launch/reduce.h"

namespace torch_sgmcmc {

constexpr int kUnitsPerBlock = kThreads / kLanes;
static_assert(kThreads == kBranches);

struct Arrays {
  void* data[kMaxArguments];
};

template <class Map, class T>
__global__ void __launch_bounds__(kThreads)
    ReduceKernel(const Map map, const Arrays arrays, const Cut cut,
                 const StretchSums to) {
  constexpr int kCount = static_cast<int>(kSums<Map>);
  static_assert(kCount <= kLanes);
  __shared__ double lanes[kCount][kUnitsPerBlock][kLanes];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int row = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t unit = int64_t{blockIdx.x} * kUnitsPerBlock + row;
  const bool inside = unit < cut.units;
  const Unit u = inside ? UnitAt(cut, to.per_chain, unit) : Unit{0, 0, 0};
  const Terms<Map> sums =
      LaneSums<Map, T>(map, arrays.data, u.begin, u.end, lane);
  for (int k = 0; k < kCount; ++k) lanes[k][row][lane] = sums[k];
  __syncthreads();
  if (lane < kCount && inside) {
    to.sums[lane * to.targets + u.target] = AddLanes(lanes[lane][row]);
  }
}

template <class Map>
__global__ void __launch_bounds__(kBranches)
    TreeKernel(const Map map, const double* sums, int64_t per_chain,
               double* out) {
  __shared__ double branches[kBranches];
  const int b = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;  // of one sum of one chain
  branches[b] = BranchSum(sums + row * per_chain, per_chain, b);
  for (int width = kBranches / 2; width > 0; width /= 2) {
    __syncthreads();
    if (b < width) branches[b] += branches[b + width];
  }
  if (b == 0) out[row] = Finish(map, branches[0]);
}

struct CudaReducer {
  // As CpuReducer's; `out` is on the plan's device.
  static void Reduce(const Plan& plan, const auto& map, int64_t num_chains,
                     Tensor& out) {
    ReduceSegments(plan.device_index(), plan.segments(), map, num_chains, out,
                   static_cast<double*>(out.data_ptr()));
  }

  template <class Map>
  static void ReduceEach(const Plan& plan, const Map& map,
                         const std::vector<int64_t>& rows, int64_t num_chains,
                         Tensor& out) {
    for (size_t i = 0; i < rows.size(); ++i) {
      ReduceSegments(plan.device_index(), {plan.segments()[i]}, map,
                     num_chains, out, RowOf<Map>(out, rows[i], num_chains));
    }
  }

  // As CpuReducer's: an update, and then the sums.
  template <template <class> class Update, class Coefficients, class Map>
  static void UpdateAndReduce(const char* op, const Plan& plan,
                              const Coefficients& coefficients, const Map& map,
                              Tensor& out) {
    CudaDriver(op, plan, std::nullopt)
        .template Apply<Update>(coefficients, NoiseStream{0, 0, 0});
    Reduce(plan, map, /*num_chains=*/1, out);
  }

 private:
  // Sums of segments on a device, to memory of `like`, a float64 tensor there.
  template <class Map>
  static void ReduceSegments(int32_t device_index,
                             const std::vector<Segment>& segments,
                             const Map& map, int64_t num_chains,
                             const Tensor& like, double* out) {
    const torch::stable::accelerator::DeviceGuard guard(device_index);
    const cudaStream_t stream = CurrentStream(device_index);
    const Cuts all(segments, num_chains);
    constexpr auto kCount = static_cast<int64_t>(kSums<Map>);
    const int64_t targets = num_chains * all.per_chain;
    const Tensor sums =
        torch::stable::new_empty(like, {kCount * targets}, ScalarType::Double);
    const StretchSums to{static_cast<double*>(sums.data_ptr()), targets,
                         all.per_chain};
    for (size_t i = 0; i < segments.size(); ++i) {
      const Cut& cut = all.cuts[i];
      Arrays arrays;
      std::copy_n(segments[i].data, kMaxArguments, arrays.data);
      const auto blocks = static_cast<unsigned>(
          (cut.units + kUnitsPerBlock - 1) / kUnitsPerBlock);
      WithElement(segments[i].dtype, [&](auto element) {
        ReduceKernel<Map, CompiledFor<Map, decltype(element)>>
            <<<blocks, kThreads, 0, stream>>>(map, arrays, cut, to);
      });
      CheckCuda(cudaGetLastError(), "kernel launch failed");
    }
    const auto rows = static_cast<unsigned>(kCount * num_chains);
    TreeKernel<<<rows, kBranches, 0, stream>>>(map, to.sums, all.per_chain,
                                               out);
    CheckCuda(cudaGetLastError(), "kernel launch failed");
  }
};

}  // namespace torch_sgmcmc
