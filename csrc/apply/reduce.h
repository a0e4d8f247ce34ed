// Sums over all elements of a plan, in float64 and in one fixed order.
//
// Elements are cut into stretches; inside a stretch, kLanes running sums take
// every kLanes-th element and are then added in order; the stretches' sums are
// added in order. Nothing depends on the number of threads, and the CUDA driver
// keeps the same order.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <vector>

#include "apply/parallel.h"
#include "apply/plan.h"
#include "core/macros.h"

namespace torch_sgmcmc {

constexpr int kLanes = 16;

struct Square {
  SG_INLINE double operator()(double x) const { return x * x; }
};

template <class Map, class T>
double ReduceStretch(const Map& map, const T* data, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      lanes[l] += map(static_cast<double>(data[i + l]));
    }
  }
  for (int l = 0; i < count; ++i, ++l) {
    lanes[l] += map(static_cast<double>(data[i]));
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class Map>
double ReduceStretch(const Map& map,
                     const Segment& s,
                     int64_t begin,
                     int64_t count) {
  switch (s.dtype) {
    case ScalarType::Double:
      return ReduceStretch(
          map, static_cast<const double*>(s.data[0]) + begin, count);
    case ScalarType::BFloat16:
      return ReduceStretch(
          map,
          static_cast<const torch::headeronly::BFloat16*>(s.data[0]) + begin,
          count);
    case ScalarType::Half:
      return ReduceStretch(
          map,
          static_cast<const torch::headeronly::Half*>(s.data[0]) + begin,
          count);
    default:
      return ReduceStretch(
          map, static_cast<const float*>(s.data[0]) + begin, count);
  }
}

template <class Map>
double ReduceOnCpu(const std::vector<Segment>& segments, const Map& map) {
  std::vector<std::vector<double>> sums;
  for (const Segment& s : segments) {
    sums.emplace_back((s.numel + kStretch - 1) / kStretch);
  }
  ParallelOverStretches(
      segments, [&](const Segment& s, int64_t begin, int64_t end) {
        std::vector<double>& out = sums[&s - segments.data()];
        for (int64_t i = begin; i < end; i += kStretch) {
          out[i / kStretch] =
              ReduceStretch(map, s, i, std::min(kStretch, end - i));
        }
      });
  double total = 0;
  for (const std::vector<double>& parts : sums) {
    for (const double part : parts) total += part;
  }
  return total;
}

}  // namespace torch_sgmcmc
