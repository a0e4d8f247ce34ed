#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/cuda.cuh"
#include "ops/fused_step.h"
#include "ops/nonfinite.h"

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
  const Nonfinite found = CountThread<T>(table, int64_t{blockIdx.x},
                                         static_cast<int>(threadIdx.x), &place);
  AddTo(counts + place, found.nans);
  AddTo(counts + place + 1, found.infinities);
}

Tensor CountNonfiniteOf(const char* op, const TensorList& tensors,
                        const char* name) {
  const Plan plan = PlanToCount(op, tensors, name);
  const torch::stable::accelerator::DeviceGuard guard(plan.device_index());
  const cudaStream_t stream = CurrentStream(plan.device_index());
  Tensor result = NoCounts(tensors);
  auto* counts = static_cast<int64_t*>(result.data_ptr());
  ForEachTable(plan.segments(), [&](auto element, const SegmentTable& table,
                                    int64_t blocks) {
    CountKernel<decltype(element)>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(table, counts);
    CheckCuda(cudaGetLastError(), "kernel launch failed");
  });
  return result;
}

Tensor CountNonfinite(TensorList tensors) {
  return CountNonfiniteOf("count_nonfinite", tensors, "tensors");
}

// Writes the step of the following updates, negative if they are skipped, and
// advances counters on the device.
__global__ void __launch_bounds__(kThreads)
    GateKernel(const int64_t* counts, int64_t size, int64_t step,
               const int64_t* device_step, int64_t* gate, int64_t* counter,
               int64_t* num_skipped) {
  const auto thread = static_cast<int>(threadIdx.x);
  const bool any =
      __syncthreads_or(AnyCount(counts, size, thread, kThreads)) != 0;
  if (thread != 0) return;
  *gate = GatedStep(any, step, device_step);
  if (counter != nullptr) CountStep(any, counter, num_skipped);
}

void LaunchGate(const Tensor& counts, int64_t step, const int64_t* device_step,
                const Tensor& gate, int64_t* counter = nullptr,
                int64_t* num_skipped = nullptr) {
  GateKernel<<<1, kThreads, 0, CurrentStream(counts.get_device_index())>>>(
      static_cast<const int64_t*>(counts.data_ptr()), counts.numel(), step,
      device_step, static_cast<int64_t*>(gate.data_ptr()), counter,
      num_skipped);
  CheckCuda(cudaGetLastError(), "kernel launch failed");
}

Tensor StepOrNothing(Tensor counts, int64_t step,
                     std::optional<Tensor> device_step) {
  constexpr const char* kOp = "step_or_nothing";
  CheckCounts(kOp, counts);
  const int64_t* more = CheckedDeviceStep(kOp, counts, step, device_step);
  const int32_t device = counts.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (more == nullptr) RefuseCapture(kOp, device);
  Tensor gate = torch::stable::new_empty(counts, {}, ScalarType::Long);
  LaunchGate(counts, step, more, gate);
  return gate;
}

Tensor StepIfFinite(TensorList tensors, int64_t step,
                    std::optional<Tensor> device_step) {
  return StepOrNothing(CountNonfinite(std::move(tensors)), step,
                       std::move(device_step));
}

bool FusedStep(TensorList params, TensorList grads, TensorList state,
               Tensor packed, Tensor step) {
  const auto any_nonfinite = [](const char* op, const TensorList& tensors) {
    const Tensor counts = CountNonfiniteOf(op, tensors, "grads");
    std::vector<int64_t> found(static_cast<size_t>(counts.numel()));
    const cudaStream_t stream = CurrentStream(counts.get_device_index());
    CheckCuda(cudaMemcpyAsync(found.data(), counts.data_ptr(),
                              found.size() * sizeof(int64_t),
                              cudaMemcpyDeviceToHost, stream),
              "copying counts failed");
    CheckCuda(cudaStreamSynchronize(stream), "waiting for counts failed");
    return AnyCount(found.data(), counts.numel(), /*thread=*/0, /*threads=*/1);
  };
  return FusedStepOn(CudaUpdates(), any_nonfinite, params, grads, state, packed,
                     step);
}

// The updates are launched after the check, and read its result.
std::tuple<Tensor, Tensor> DeferredStep(TensorList params, TensorList grads,
                                        TensorList state, Tensor packed,
                                        Tensor step,
                                        std::optional<Tensor> num_skipped,
                                        std::optional<Tensor> counts) {
  constexpr const char* kOp = "deferred_step_";
  const PackedStep known = Unpacked(kOp, "packed", packed);
  if (grads.empty()) Fail(kOp, "grads is empty");
  if (!grads[0].defined()) Fail(kOp, "grads[0] is undefined");
  const int32_t device = grads[0].get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (counts) CheckCounts(kOp, *counts);
  // Host counters are read and advanced here, device counters on the device.
  const bool is_counted_there = num_skipped.has_value();
  int64_t* count = is_counted_there ? DeviceCounter(kOp, "step", step, device)
                                    : HostCounter(kOp, step);
  int64_t* skipped =
      is_counted_there ? DeviceCounter(kOp, "num_skipped", *num_skipped, device)
                       : nullptr;
  if (!is_counted_there) {
    RefuseCapture(kOp, device);
    MakeStream(kOp, /*seed=*/0, *count, /*purpose=*/int64_t{0});
  }
  // The gate, which is written after the updates' arguments are checked.
  Tensor gate = torch::stable::new_empty(grads[0], {}, ScalarType::Long);
  PreparedStep prepared(kOp, CudaUpdates(), known, params, grads, state,
                        /*step=*/0, gate);
  const Tensor found = counts ? *counts
                       : known.checks != 0
                           ? CountNonfiniteOf(kOp, grads, "grads")
                           : NoCounts(grads);
  LaunchGate(found, is_counted_there ? 0 : *count,
             is_counted_there ? count : nullptr, gate,
             is_counted_there ? count : nullptr, skipped);
  prepared.Apply(is_counted_there ? nullptr : count);
  return {found, gate};
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("count_nonfinite", TORCH_BOX(&torch_sgmcmc::CountNonfinite));
  m.impl("step_or_nothing", TORCH_BOX(&torch_sgmcmc::StepOrNothing));
  m.impl("step_if_finite", TORCH_BOX(&torch_sgmcmc::StepIfFinite));
  m.impl("fused_step_", TORCH_BOX(&torch_sgmcmc::FusedStep));
  m.impl("deferred_step_", TORCH_BOX(&torch_sgmcmc::DeferredStep));
}
