// Sums over all elements of a plan, in float64 and in one fixed order.
//
// Note [Order of sums]
// Elements are cut into stretches; inside a stretch, kLanes running sums take
// every kLanes-th element and are then added in order. The stretches' sums, in
// the order of the segments, are dealt out to kBranches running sums, which are
// added in a binary tree. Where several chains share the tensors (a leading
// dimension), each chain's elements are summed so, by themselves. The order
// depends on the sizes alone: neither on the number of threads, nor on the
// instruction set, nor on the device. On a GPU a lane and a branch are a thread
// each, and run the functions below.
#pragma once

#include <string.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "apply/parallel.h"
#include "apply/plan.h"
#include "core/isa.h"
#include "core/macros.h"
#include "core/roles.h"

namespace torch_sgmcmc {

constexpr int kLanes = 16;
constexpr int kBranches = 256;

// What is summed: a map takes one element of every array to a number. kReads
// says which arrays it looks at (the others may be absent), and Finish turns
// the sum into the result.
struct Square {
  static constexpr std::array<Role, 1> kRoles = {Role::kGradient};
  static constexpr std::array<bool, 1> kReads = {true};
  SG_INLINE double operator()(const double (&x)[1]) const {
    return x[0] * x[0];
  }
  SG_INLINE static double Finish(double sum) { return sum; }
};

template <class Map, class T, size_t kIndex>
SG_INLINE double LoadAsDouble(void* const* data, int64_t i) {
  if constexpr (Map::kReads[kIndex]) {
    using Element = Stored<Map::kRoles[kIndex], T>;
    return static_cast<double>(static_cast<Arithmetic<T>>(
        static_cast<const Element*>(data[kIndex])[i]));
  } else {
    return 0;
  }
}

template <class Map, class T, size_t... kIndex>
SG_INLINE double MapElement(const Map& map,
                            void* const* data,
                            int64_t i,
                            std::index_sequence<kIndex...>) {
  const double x[] = {LoadAsDouble<Map, T, kIndex>(data, i)...};
  return map(x);
}

template <class Map>
constexpr auto MapIndices() {
  return std::make_index_sequence<std::tuple_size_v<decltype(Map::kRoles)>>();
}

// One lane's running sum over the stretch [begin, end).
template <class Map, class T>
SG_INLINE double LaneSum(
    const Map& map, void* const* data, int64_t begin, int64_t end, int lane) {
  double sum = 0;
  for (int64_t i = begin + lane; i < end; i += kLanes) {
    sum += MapElement<Map, T>(map, data, i, MapIndices<Map>());
  }
  return sum;
}

SG_INLINE double AddLanes(const double* lanes) {
  double sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += lanes[l];
  return sum;
}

// One branch's running sum over the sums of stretches.
SG_INLINE double BranchSum(const double* sums, int64_t count, int branch) {
  double sum = 0;
  for (int64_t i = branch; i < count; i += kBranches) sum += sums[i];
  return sum;
}

// All branches, added in a tree. Those past the end hold zeros, which may be
// left out.
inline double AddInTree(const double* sums, int64_t count) {
  double branches[kBranches];
  int width = 1;
  while (width < kBranches && width < count) width *= 2;
  for (int b = 0; b < width; ++b) branches[b] = BranchSum(sums, count, b);
  while (width > 1) {
    width /= 2;
    for (int b = 0; b < width; ++b) branches[b] += branches[b + width];
  }
  // cppcheck-suppress uninitvar  // width is 1 at least, so it is set.
  return branches[0];
}

// How one segment is cut: into rows, one a chain, and those into stretches.
struct Cut {
  int64_t row;        // elements of a row
  int64_t stretches;  // in a row
  int64_t units;      // stretches in all rows
  int64_t first;      // position of a row's first stretch among its chain's
};

struct Cuts {
  Cuts(const std::vector<Segment>& segments, int64_t num_chains) {
    for (const Segment& s : segments) {
      const int64_t row = s.numel / num_chains;
      const int64_t stretches = (row + kStretch - 1) / kStretch;
      cuts.push_back({row, stretches, num_chains * stretches, per_chain});
      per_chain += stretches;
    }
  }
  std::vector<Cut> cuts;
  int64_t per_chain = 0;  // stretches of a chain in all segments
};

// Where a stretch, the unit-th of a segment, lies, and where its sum belongs.
struct Unit {
  int64_t begin;
  int64_t end;
  int64_t target;
};

SG_INLINE Unit UnitAt(const Cut& cut, int64_t per_chain, int64_t unit) {
  const int64_t chain = unit / cut.stretches;
  const int64_t stretch = unit - chain * cut.stretches;
  const int64_t begin = stretch * kStretch;
  const int64_t end = begin + kStretch < cut.row ? begin + kStretch : cut.row;
  return {chain * cut.row + begin,
          chain * cut.row + end,
          chain * per_chain + cut.first + stretch};
}

}  // namespace torch_sgmcmc

// NOLINTBEGIN(readability-duplicate-include): once for each instruction set.
#if defined(SG_X86)
SG_REGION_AVX512
namespace torch_sgmcmc::avx512 {
#include "apply/reduce_loop.inl"
}  // namespace torch_sgmcmc::avx512
SG_REGION_END

SG_REGION_AVX2
namespace torch_sgmcmc::avx2 {
#include "apply/reduce_loop.inl"
}  // namespace torch_sgmcmc::avx2
SG_REGION_END
#endif

namespace torch_sgmcmc::portable {
#include "apply/reduce_loop.inl"
}  // namespace torch_sgmcmc::portable
// NOLINTEND(readability-duplicate-include)

namespace torch_sgmcmc {

template <class Map, class T>
void ReduceUnitsOnIsa(const Map& map,
                      const Segment& segment,
                      const Cut& cut,
                      int64_t per_chain,
                      int64_t begin,
                      int64_t end,
                      double* sums,
                      Isa isa) {
#if defined(SG_X86)
  if (isa == Isa::kAvx512) {
    return avx512::ReduceUnits<Map, T>(
        map, segment.data, cut, per_chain, begin, end, sums);
  }
  if (isa == Isa::kAvx2) {
    return avx2::ReduceUnits<Map, T>(
        map, segment.data, cut, per_chain, begin, end, sums);
  }
#endif
  static_cast<void>(isa);
  portable::ReduceUnits<Map, T>(
      map, segment.data, cut, per_chain, begin, end, sums);
}

// Writes every chain's sum to out[0, num_chains).
template <class Map>
void ReduceOnCpu(const std::vector<Segment>& segments,
                 const Map& map,
                 int64_t num_chains,
                 double* out,
                 Isa isa = ActiveIsa()) {
  const Cuts all(segments, num_chains);
  std::vector<double> sums(static_cast<size_t>(num_chains * all.per_chain));
  // Threads share chunks of units, of about kStretch elements each.
  const auto units_per_chunk = [](const Cut& cut) {
    return std::max<int64_t>(1, kStretch / cut.row);
  };
  std::vector<int64_t> first_chunk = {0};
  for (const Cut& cut : all.cuts) {
    const int64_t units = units_per_chunk(cut);
    first_chunk.push_back(first_chunk.back() + (cut.units + units - 1) / units);
  }
  const auto work = [&](int64_t begin, int64_t end) {
    size_t i = static_cast<size_t>(
        std::upper_bound(first_chunk.begin(), first_chunk.end(), begin) -
        first_chunk.begin() - 1);
    while (begin < end) {
      const Segment& s = segments[i];
      const Cut& cut = all.cuts[i];
      const int64_t stop = std::min(end, first_chunk[i + 1]);
      const int64_t units = units_per_chunk(cut);
      const int64_t from = (begin - first_chunk[i]) * units;
      const int64_t to = std::min(cut.units, (stop - first_chunk[i]) * units);
      const auto run = [&](auto zero) {
        ReduceUnitsOnIsa<Map, decltype(zero)>(
            map, s, cut, all.per_chain, from, to, sums.data(), isa);
      };
      switch (s.dtype) {
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
      begin = stop;
      ++i;
    }
  };
  torch::stable::parallel_for(0, first_chunk.back(), kGrain, work);
  for (int64_t chain = 0; chain < num_chains; ++chain) {
    out[chain] = map.Finish(
        AddInTree(sums.data() + chain * all.per_chain, all.per_chain));
  }
}

// Reduces plans on the CPU, for operators that are written for any device.
struct CpuReducer {
  // Writes every chain's sum to `out`, a float64 tensor.
  template <class Map>
  static void Reduce(const Plan& plan,
                     const Map& map,
                     int64_t num_chains,
                     Tensor& out) {
    ReduceOnCpu(
        plan.segments(), map, num_chains, static_cast<double*>(out.data_ptr()));
  }
};

}  // namespace torch_sgmcmc
