#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "apply/cuda.cuh"
#include "methods/nonfinite_op.h"

namespace torch_sgmcmc {
namespace {

__device__ void AddTo(int64_t* count, int64_t more) {
  if (more == 0) return;  // as nearly always
  atomicAdd(reinterpret_cast<unsigned long long*>(count),
            static_cast<unsigned long long>(more));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    CountKernel(const __grid_constant__ SegmentTable table, int64_t* counts) {
  int64_t place = 0;
  const Nonfinite found = CountThread<T>(
      table, int64_t{blockIdx.x}, static_cast<int>(threadIdx.x), &place);
  AddTo(counts + place, found.nans);
  AddTo(counts + place + 1, found.infinities);
}

template <class T>
void CountAll(const Plan& plan,
              ScalarType dtype,
              int64_t* counts,
              cudaStream_t stream) {
  ForEachTable(
      plan.segments(), dtype, [&](const SegmentTable& table, int64_t blocks) {
        CountKernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
            table, counts);
        CheckCuda(cudaGetLastError(), "kernel launch failed");
      });
}

Tensor CountNonfinite(TensorList tensors) {
  const Plan plan = PlanToCount("count_nonfinite", tensors);
  const torch::stable::accelerator::DeviceGuard guard(plan.device_index());
  const cudaStream_t stream = CurrentStream(plan.device_index());
  Tensor result = NoCounts(tensors);
  auto* counts = static_cast<int64_t*>(result.data_ptr());
  CountAll<double>(plan, ScalarType::Double, counts, stream);
  CountAll<float>(plan, ScalarType::Float, counts, stream);
  CountAll<torch::headeronly::BFloat16>(
      plan, ScalarType::BFloat16, counts, stream);
  CountAll<torch::headeronly::Half>(plan, ScalarType::Half, counts, stream);
  return result;
}

__global__ void __launch_bounds__(kThreads)
    GateKernel(const int64_t* counts,
               int64_t size,
               int64_t step,
               const int64_t* device_step,
               int64_t* gate) {
  const auto thread = static_cast<int>(threadIdx.x);
  const bool any =
      __syncthreads_or(AnyCount(counts, size, thread, kThreads)) != 0;
  if (thread == 0) *gate = GatedStep(any, step, device_step);
}

Tensor StepOrNothing(Tensor counts,
                     int64_t step,
                     std::optional<Tensor> device_step) {
  constexpr const char* kOp = "step_or_nothing";
  CheckCounts(kOp, counts);
  const int64_t* more = CheckedDeviceStep(kOp, counts, step, device_step);
  const int32_t device = counts.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (more == nullptr) RefuseCapture(kOp, device);
  Tensor result = torch::stable::new_empty(counts, {}, ScalarType::Long);
  GateKernel<<<1, kThreads, 0, CurrentStream(device)>>>(
      static_cast<const int64_t*>(counts.data_ptr()),
      counts.numel(),
      step,
      more,
      static_cast<int64_t*>(result.data_ptr()));
  CheckCuda(cudaGetLastError(), "kernel launch failed");
  return result;
}

Tensor StepIfFinite(TensorList tensors,
                    int64_t step,
                    std::optional<Tensor> device_step) {
  return StepOrNothing(
      CountNonfinite(std::move(tensors)), step, std::move(device_step));
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("count_nonfinite", TORCH_BOX(&torch_sgmcmc::CountNonfinite));
  m.impl("step_or_nothing", TORCH_BOX(&torch_sgmcmc::StepOrNothing));
  m.impl("step_if_finite", TORCH_BOX(&torch_sgmcmc::StepIfFinite));
}
