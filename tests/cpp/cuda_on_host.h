// The CUDA drivers on the host: apply/cuda.cuh and sum_of_squares_cuda.cu with
// launches and threads turned into loops.
//
// What CUDA adds of its own, loads, stores and launches, is mirrored here line
// by line; index arithmetic, noise and update are the very functions that the
// kernels call. Keep it in step with apply/cuda.cuh.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "apply/chunks.h"
#include "apply/plan.h"
#include "apply/reduce.h"
#include "core/counter.h"
#include "core/portable_noise.h"
#include "core/roles.h"

namespace torch_sgmcmc::cuda_on_host {

constexpr int kMaxSegments = 48;

struct SegmentTable {
  void* data[kMaxArguments][kMaxSegments];
  int64_t numel[kMaxSegments];
  uint64_t offset[kMaxSegments];
  int64_t first_chunk[kMaxSegments];
  int count = 0;
};

template <Role role, class T>
void LoadQuad(const void* data, const QuadSpan& span, Arithmetic<T> (&out)[4]) {
  if constexpr (IsRead(role)) {
    const auto* p = static_cast<const Stored<role, T>*>(data);
    for (int w = span.begin; w < span.end; ++w) {
      out[w] = static_cast<Arithmetic<T>>(p[span.origin + w]);
    }
  }
}

template <Role role, class T>
void StoreQuad(void* data, const QuadSpan& span, const Arithmetic<T> (&in)[4]) {
  if constexpr (IsWritten(role)) {
    using Element = Stored<role, T>;
    auto* p = static_cast<Element*>(data);
    for (int w = span.begin; w < span.end; ++w) {
      p[span.origin + w] = static_cast<Element>(in[w]);
    }
  }
}

template <class Update, class T, size_t... kIndex>
void UpdateQuad(const Update& update,
                void* const* data,
                const QuadSpan& span,
                const NoiseStream& stream,
                std::index_sequence<kIndex...>) {
  using Real = Arithmetic<T>;
  constexpr int kCount = sizeof...(kIndex);
  Real x[kCount][4] = {};
  (LoadQuad<Update::kRoles[kIndex], T>(data[kIndex], span, x[kIndex]), ...);
  float noise[4] = {};
  if (update.needs_noise()) portable::QuadNormals(stream, span.quad, noise);
  for (int w = 0; w < 4; ++w) {
    Real element[kCount] = {x[kIndex][w]...};
    update(element, static_cast<Real>(noise[w]));
    ((x[kIndex][w] = element[kIndex]), ...);
  }
  (StoreQuad<Update::kRoles[kIndex], T>(data[kIndex], span, x[kIndex]), ...);
}

template <class Update, class T>
void Launch(const Update& update,
            const SegmentTable& table,
            const NoiseStream& stream,
            int64_t blocks) {
  if (update.skips(stream.step)) return;
  constexpr auto kIndices =
      std::make_index_sequence<std::tuple_size_v<decltype(Update::kRoles)>>();
  for (int64_t block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) {
      const int s = SegmentOf(table.first_chunk, table.count, block);
      void* data[kMaxArguments];
      for (int j = 0; j < kMaxArguments; ++j) data[j] = table.data[j][s];
      for (int k = 0; k < kQuadsPerThread; ++k) {
        const QuadSpan span = SpanOf(table.numel[s],
                                     table.offset[s],
                                     block - table.first_chunk[s],
                                     thread,
                                     k);
        if (span.begin < span.end) {
          UpdateQuad<Update, T>(update, data, span, stream, kIndices);
        }
      }
    }
  }
}

// Launches all segments of one dtype, as few tables as they fit in.
template <class T, class Update>
void LaunchAll(const Update& update,
               const NoiseStream& stream,
               const std::vector<Segment>& segments,
               ScalarType dtype) {
  SegmentTable table;
  int64_t chunks = 0;
  for (const Segment& s : segments) {
    if (s.dtype != dtype) continue;
    if (table.count == kMaxSegments) {
      Launch<Update, T>(update, table, stream, chunks);
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
    chunks += ChunkCount(s.numel, s.offset);
  }
  if (table.count > 0) Launch<Update, T>(update, table, stream, chunks);
}

// Stands in for CudaDriver, so that whole operators can run on it.
class Driver {
 public:
  Driver(const char* op,
         const Plan& plan,
         const std::optional<Tensor>& device_step)
      : plan_(plan), device_step_(DeviceStep(op, plan, device_step)) {}

  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients, NoiseStream stream) const {
    Apply<Update>(coefficients, stream, plan_.segments());
  }

  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients,
             NoiseStream stream,
             const std::vector<Segment>& segments) const {
    const Update<float> single(coefficients);
    const Update<double> twice(coefficients);
    if (device_step_ != nullptr) {
      stream.step += static_cast<uint64_t>(*device_step_);
    }
    LaunchAll<double>(twice, stream, segments, ScalarType::Double);
    LaunchAll<float>(single, stream, segments, ScalarType::Float);
    LaunchAll<torch::headeronly::BFloat16>(
        single, stream, segments, ScalarType::BFloat16);
    LaunchAll<torch::headeronly::Half>(
        single, stream, segments, ScalarType::Half);
  }

 private:
  const Plan& plan_;
  const int64_t* device_step_;
};

// The kernels of samplers/sum_of_squares_cuda.cu.
template <class T, class Map>
double Reduce(const Map& map, const std::vector<Segment>& segments) {
  std::vector<double> sums;
  for (const Segment& s : segments) {
    const T* data = static_cast<const T*>(s.data[0]);
    for (int64_t begin = 0; begin < s.numel; begin += kStretch) {
      const int64_t end = std::min(begin + kStretch, s.numel);
      double lanes[kLanes] = {};
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int64_t i = begin + lane; i < end; i += kLanes) {
          lanes[lane] += map(static_cast<double>(data[i]));
        }
      }
      double total = 0;
      for (const double lane : lanes) total += lane;
      sums.push_back(total);
    }
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace torch_sgmcmc::cuda_on_host
