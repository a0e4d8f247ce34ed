#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "apply/cuda.cuh"
#include "apply/reduce.h"

namespace torch_sgmcmc {
namespace {

// One thread per lane of a stretch, then one thread per stretch adds the lanes,
// then one thread adds the stretches: the order of apply/reduce.h.
constexpr int kStretchesPerBlock = kThreads / kLanes;

template <class Map, class T>
__global__ void __launch_bounds__(kThreads)
    ReduceKernel(const Map map, const T* data, int64_t numel, double* sums) {
  __shared__ double lanes[kStretchesPerBlock][kLanes];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int row = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t stretch = int64_t{blockIdx.x} * kStretchesPerBlock + row;
  const int64_t begin = stretch * kStretch;
  const int64_t end = begin + kStretch < numel ? begin + kStretch : numel;
  double sum = 0;
  for (int64_t i = begin + lane; i < end; i += kLanes) {
    sum += map(static_cast<double>(data[i]));
  }
  lanes[row][lane] = sum;
  __syncthreads();
  if (lane == 0 && begin < numel) {
    double total = 0;
    for (int l = 0; l < kLanes; ++l) total += lanes[row][l];
    sums[stretch] = total;
  }
}

__global__ void AddKernel(const double* sums, int64_t count, double* result) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += sums[i];
  *result = total;
}

template <class T>
void Reduce(const Segment& s, double* sums, cudaStream_t stream) {
  const int64_t stretches = (s.numel + kStretch - 1) / kStretch;
  const int64_t blocks =
      (stretches + kStretchesPerBlock - 1) / kStretchesPerBlock;
  ReduceKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      Square(), static_cast<const T*>(s.data[0]), s.numel, sums);
  CheckCuda(cudaGetLastError(), "kernel launch failed");
}

Tensor SumOfSquares(TensorList tensors) {
  constexpr const char* kOp = "sum_of_squares";
  if (tensors.empty()) Fail(kOp, "tensors is empty");
  const Plan plan(kOp,
                  {{"tensors", Role::kGradient, tensors}},
                  std::vector<int64_t>(tensors.size(), 0));
  const torch::stable::accelerator::DeviceGuard guard(plan.device_index());
  const cudaStream_t stream = CurrentStream(plan.device_index());
  int64_t stretches = 0;
  for (const Segment& s : plan.segments()) {
    stretches += (s.numel + kStretch - 1) / kStretch;
  }
  const Tensor result =
      torch::stable::new_empty(tensors[0], {}, ScalarType::Double);
  const Tensor sums =
      torch::stable::new_empty(tensors[0], {stretches}, ScalarType::Double);
  double* out = static_cast<double*>(sums.data_ptr());
  for (const Segment& s : plan.segments()) {
    switch (s.dtype) {
      case ScalarType::Double:
        Reduce<double>(s, out, stream);
        break;
      case ScalarType::BFloat16:
        Reduce<torch::headeronly::BFloat16>(s, out, stream);
        break;
      case ScalarType::Half:
        Reduce<torch::headeronly::Half>(s, out, stream);
        break;
      default:
        Reduce<float>(s, out, stream);
    }
    out += (s.numel + kStretch - 1) / kStretch;
  }
  AddKernel<<<1, 1, 0, stream>>>(static_cast<const double*>(sums.data_ptr()),
                                 stretches,
                                 static_cast<double*>(result.data_ptr()));
  CheckCuda(cudaGetLastError(), "kernel launch failed");
  return result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("sum_of_squares", TORCH_BOX(&torch_sgmcmc::SumOfSquares));
}
