// The CUDA driver: plan -> tables of segments -> one kernel launch per table.
//
// A table travels in the kernel's arguments, so a launch needs no copy, no
// allocation and no synchronisation, and can be captured in a CUDA graph. All
// index arithmetic is in apply/chunks.h, all noise in core/noise.inl, all
// update arithmetic in samplers/*.h; what is written here is only loads, stores
// and the launch.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "apply/chunks.h"
#include "apply/plan.h"
#include "core/portable_noise.h"
#include "core/roles.h"

namespace torch_sgmcmc {

// Kernel arguments may take 4 KiB on every architecture.
constexpr int kMaxSegments = 48;

struct SegmentTable {
  void* data[kMaxArguments][kMaxSegments];
  int64_t numel[kMaxSegments];
  uint64_t offset[kMaxSegments];
  int64_t first_chunk[kMaxSegments];
  int count = 0;
};
static_assert(sizeof(SegmentTable) < 3900);

inline void CheckCuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error("torch_sgmcmc: " + std::string(what) + ": " +
                             cudaGetErrorString(error));
  }
}

inline cudaStream_t CurrentStream(int32_t device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

template <class T>
struct alignas(4 * sizeof(T)) Quad {
  T value[4];
};

template <Role role, class T>
__device__ void LoadQuad(const void* data,
                         const QuadSpan& span,
                         bool whole,
                         Arithmetic<T> (&out)[4]) {
  if constexpr (IsRead(role)) {
    using Element = Stored<role, T>;
    const Element* p = static_cast<const Element*>(data) + span.origin;
    if (whole) {
      const Quad<Element> q = *reinterpret_cast<const Quad<Element>*>(p);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        out[w] = static_cast<Arithmetic<T>>(q.value[w]);
      }
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (span.begin <= w && w < span.end) {
          out[w] = static_cast<Arithmetic<T>>(p[w]);
        }
      }
    }
  }
}

template <Role role, class T>
__device__ void StoreQuad(void* data,
                          const QuadSpan& span,
                          bool whole,
                          const Arithmetic<T> (&in)[4]) {
  if constexpr (IsWritten(role)) {
    using Element = Stored<role, T>;
    Element* p = static_cast<Element*>(data) + span.origin;
    if (whole) {
      Quad<Element> q;
#pragma unroll
      for (int w = 0; w < 4; ++w) q.value[w] = static_cast<Element>(in[w]);
      *reinterpret_cast<Quad<Element>*>(p) = q;
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (span.begin <= w && w < span.end) {
          p[w] = static_cast<Element>(in[w]);
        }
      }
    }
  }
}

template <Role role, class T>
__device__ bool IsAligned(const void* data, int64_t origin) {
  using Element = Stored<role, T>;
  return reinterpret_cast<uintptr_t>(static_cast<const Element*>(data) +
                                     origin) %
             sizeof(Quad<Element>) ==
         0;
}

template <class Update, class T, size_t... kIndex>
__device__ void UpdateQuad(const Update& update,
                           void* const* data,
                           const QuadSpan& span,
                           const NoiseStream& stream,
                           std::index_sequence<kIndex...>) {
  using Real = Arithmetic<T>;
  constexpr int kCount = sizeof...(kIndex);
  const bool whole =
      span.begin == 0 && span.end == 4 &&
      (IsAligned<Update::kRoles[kIndex], T>(data[kIndex], span.origin) && ...);
  Real x[kCount][4] = {};
  (LoadQuad<Update::kRoles[kIndex], T>(data[kIndex], span, whole, x[kIndex]),
   ...);
  float noise[4] = {};
  if (update.needs_noise()) portable::QuadNormals(stream, span.quad, noise);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    Real element[kCount] = {x[kIndex][w]...};
    update(element, static_cast<Real>(noise[w]));
    ((x[kIndex][w] = element[kIndex]), ...);
  }
  (StoreQuad<Update::kRoles[kIndex], T>(data[kIndex], span, whole, x[kIndex]),
   ...);
}

template <class Update, class T>
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(const Update update,
                 const __grid_constant__ SegmentTable table,
                 NoiseStream stream,
                 const int64_t* device_step) {
  if (device_step != nullptr) {
    stream.step += static_cast<uint64_t>(*device_step);
  }
  if (update.skips(stream.step)) return;
  constexpr auto kIndices =
      std::make_index_sequence<std::tuple_size_v<decltype(Update::kRoles)>>();
  const int64_t block = blockIdx.x;
  const int s = SegmentOf(table.first_chunk, table.count, block);
  void* data[kMaxArguments];
#pragma unroll
  for (int j = 0; j < kMaxArguments; ++j) data[j] = table.data[j][s];
#pragma unroll
  for (int k = 0; k < kQuadsPerThread; ++k) {
    const QuadSpan span = SpanOf(table.numel[s],
                                 table.offset[s],
                                 block - table.first_chunk[s],
                                 static_cast<int>(threadIdx.x),
                                 k);
    if (span.begin < span.end) {
      UpdateQuad<Update, T>(update, data, span, stream, kIndices);
    }
  }
}

// Applies update functors to a plan on its CUDA device, on torch's current
// stream.
class CudaDriver {
 public:
  CudaDriver(const char* op,
             const Plan& plan,
             const std::optional<Tensor>& device_step)
      : plan_(plan), device_step_(DeviceStep(op, plan, device_step)) {}

  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients,
             const NoiseStream& stream) const {
    Apply<Update>(coefficients, stream, plan_.segments());
  }

  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients,
             const NoiseStream& stream,
             const std::vector<Segment>& segments) const {
    if (segments.empty()) return;
    const torch::stable::accelerator::DeviceGuard guard(plan_.device_index());
    const Update<float> single(coefficients);
    const Update<double> twice(coefficients);
    LaunchAll<double>(twice, stream, segments, ScalarType::Double);
    LaunchAll<float>(single, stream, segments, ScalarType::Float);
    LaunchAll<torch::headeronly::BFloat16>(
        single, stream, segments, ScalarType::BFloat16);
    LaunchAll<torch::headeronly::Half>(
        single, stream, segments, ScalarType::Half);
  }

 private:
  // Launches all segments of one dtype, as few tables as they fit in.
  template <class T, class Update>
  void LaunchAll(const Update& update,
                 const NoiseStream& stream,
                 const std::vector<Segment>& segments,
                 ScalarType dtype) const {
    constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
    SegmentTable table;
    int64_t chunks = 0;
    for (const Segment& s : segments) {
      if (s.dtype != dtype) continue;
      const int64_t more = ChunkCount(s.numel, s.offset);
      if (table.count == kMaxSegments ||
          (table.count > 0 && chunks + more > kMaxBlocks)) {
        Launch<T>(update, stream, table, chunks);
        table.count = 0;
        chunks = 0;
      }
      for (int j = 0; j < kMaxArguments; ++j) {
        table.data[j][table.count] = s.data[j];
      }
      table.numel[table.count] = s.numel;
      table.offset[table.count] = s.offset;
      table.first_chunk[table.count] = chunks;
      ++table.count;
      chunks += more;
    }
    if (table.count > 0) Launch<T>(update, stream, table, chunks);
  }

  template <class T, class Update>
  void Launch(const Update& update,
              const NoiseStream& stream,
              const SegmentTable& table,
              int64_t chunks) const {
    UpdateKernel<Update, T><<<static_cast<unsigned>(chunks),
                              kThreads,
                              0,
                              CurrentStream(plan_.device_index())>>>(
        update, table, stream, device_step_);
    CheckCuda(cudaGetLastError(), "kernel launch failed");
  }

  const Plan& plan_;
  const int64_t* device_step_;
};

}  // namespace torch_sgmcmc
