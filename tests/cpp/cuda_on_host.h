// The CUDA drivers on the host: apply/cuda.cuh and sum_of_squares_cuda.cu with
// launches and threads turned into loops.
//
// What a thread does (apply/tables.h) is the very code that the kernels call;
// only the launches of cuda.cuh and the reduction's threads are mirrored here.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "apply/chunks.h"
#include "apply/plan.h"
#include "apply/reduce.h"
#include "apply/tables.h"
#include "core/counter.h"

namespace torch_sgmcmc::cuda_on_host {

template <class Update, class T>
void Launch(const Update& update,
            const SegmentTable& table,
            const NoiseStream& stream,
            int64_t blocks) {
  if (update.skips(stream.step)) return;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) {
      UpdateThread<Update, T>(update, table, stream, block, thread);
    }
  }
}

template <class T, class Update>
void LaunchAll(const Update& update,
               const NoiseStream& stream,
               const std::vector<Segment>& segments,
               ScalarType dtype) {
  ForEachTable(segments, dtype, [&](const SegmentTable& table, int64_t blocks) {
    Launch<Update, T>(update, table, stream, blocks);
  });
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
