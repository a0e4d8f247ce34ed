// The CUDA driver: plan -> tables of segments -> one kernel launch per table.
//
// A table is a kernel argument, so a launch needs no copy, allocation or
// synchronisation, and can be captured in a CUDA graph. launch/tables.h has the
// work of a thread.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "launch/chunks.h"
#include "launch/plan.h"
#include "launch/tables.h"
#include "ops/roles.h"
#include "random/portable_noise.h"

namespace torch_sgmcmc {

inline void CheckCuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error("torch_sgmcmc: " + std::string(what) + ": " +
                             cudaGetErrorString(error));
  }
}

inline cudaStream_t CurrentStream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// A captured graph would freeze the host's step counter, and repeat its noise.
inline void RefuseCapture(const char* op, int32_t device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CheckCuda(cudaStreamIsCapturing(CurrentStream(device), &status),
            "cudaStreamIsCapturing");
  if (status != cudaStreamCaptureStatusNone) {
    Fail(op,
         "noise cannot be captured in a CUDA graph with a step counter on the "
         "host: give device_step (samplers: construct with capturable=True)");
  }
}

// The type for which a functor is compiled: the arithmetic type if no argument
// has the parameters' type.
template <class Functor>
constexpr bool kIsArithmeticAlone = [] {
  for (const Role role : Functor::kRoles) {
    if (!IsInArithmeticType(role)) return false;
  }
  return true;
}();
template <class Functor, class T>
using CompiledFor =
    std::conditional_t<kIsArithmeticAlone<Functor>, Arithmetic<T>, T>;

template <class Update, class T>
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(const Update update,
                 const __grid_constant__ SegmentTable table, NoiseStream stream,
                 const int64_t* device_step) {
  if (!AddDeviceStep(device_step, stream)) return;
  if (Skips(update, stream.step)) return;
  const int64_t chain = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (chain > 0 && chain >= table.num_chains) return;
  UpdateThread<Update, T>(update, table, stream, int64_t{blockIdx.x}, chain,
                          static_cast<int>(threadIdx.x));
}

// Applies update functors on a plan's CUDA device and torch's current stream.
class CudaDriver {
 public:
  CudaDriver(const char* op, const Plan& plan,
             const std::optional<Tensor>& device_step)
      : op_(op), plan_(plan), device_step_(DeviceStep(op, plan, device_step)) {}

  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients,
             const NoiseStream& stream) const {
    Apply<Update>(coefficients, stream, plan_.segments());
  }

  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients, const NoiseStream& stream,
             const std::vector<Segment>& segments) const {
    if (segments.empty()) return;
    const torch::stable::accelerator::DeviceGuard guard(plan_.device_index());
    const BothTypes<Update> updates(coefficients);
    if (NeedsNoise(updates.template For<float>()) && device_step_ == nullptr) {
      RefuseCapture(op_, plan_.device_index());
    }
    ForEachTable(segments,
                 [&](auto element, const SegmentTable& table, int64_t blocks) {
                   using T = decltype(element);
                   Launch<T>(updates.template For<T>(), stream, table, blocks);
                 });
  }

 private:
  template <class T, class Update>
  void Launch(const Update& update, const NoiseStream& stream,
              const SegmentTable& table, int64_t blocks) const {
    // The most blocks in a grid's second dimension; further chains use the
    // third.
    constexpr int64_t kMost = 65535;
    const int64_t chains = std::max<int64_t>(1, table.num_chains);
    const auto row = static_cast<unsigned>(std::min(kMost, chains));
    const auto rows = static_cast<unsigned>((chains + kMost - 1) / kMost);
    UpdateKernel<Update, CompiledFor<Update, T>>
        <<<dim3(static_cast<unsigned>(blocks), row, rows), kThreads, 0,
           CurrentStream(plan_.device_index())>>>(update, table, stream,
                                                  device_step_);
    CheckCuda(cudaGetLastError(), "kernel launch failed");
  }

  const char* op_;
  const Plan& plan_;
  const int64_t* device_step_;
};

}  // namespace torch_sgmcmc
