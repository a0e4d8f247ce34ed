// Sums over all elements of a plan, in float64 and in a fixed order; several in
// one pass over memory, optionally after an update.
//
// Note [Order of sums]
// In a stretch, kLanes running sums take every kLanes-th element and are added
// in order. The stretches' sums, in the order of segments, are dealt out to
// kBranches running sums, which are added in a binary tree. Each chain of a
// leading dimension has separate sums. The order depends on sizes alone, not
// on threads, instruction set or device. On a GPU a lane and a branch are a
// thread each.
#pragma once

#include <string.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "launch/parallel.h"
#include "launch/plan.h"
#include "ops/roles.h"
#include "random/isa.h"
#include "random/macros.h"

namespace torch_sgmcmc {

constexpr int kLanes = 16;
constexpr int kBranches = 256;

// Note [Maps]
// A map returns the terms of an element: a number, or an array of numbers with
// a sum each. kReads are the arrays it reads (others may be absent); Finish
// turns a sum into the result.
template <class Map, class T, size_t kIndex>
SG_INLINE double ElementAsDouble(const Stored<Map::kRoles[kIndex], T>* array,
                                 int64_t i) {
  if constexpr (Map::kReads[kIndex]) {
    return static_cast<double>(static_cast<Arithmetic<T>>(array[i]));
  } else {
    return 0;
  }
}

template <class Map, class T, size_t kIndex>
SG_INLINE double LoadAsDouble(const Map& map, void* const* data, int64_t i) {
  constexpr Role kRole = Map::kRoles[kIndex];
  const void* array = data[SlotOf(kRole, kIndex)];
  if constexpr (kRole == Role::kPriorMean) {
    if (array == nullptr) {
      return static_cast<double>(static_cast<Arithmetic<T>>(map.prior_mean()));
    }
  }
  return ElementAsDouble<Map, T, kIndex>(
      static_cast<const Stored<kRole, T>*>(array), i);
}

// A map's terms.
template <class Map>
using TermsOfMap =
    std::invoke_result_t<const Map&, const double (&)[kArguments<Map>]>;
template <class Map>
using Terms = std::conditional_t<std::is_same_v<TermsOfMap<Map>, double>,
                                 std::array<double, 1>, TermsOfMap<Map>>;

template <class Map>
constexpr size_t kSums = std::tuple_size_v<Terms<Map>>;

template <class Map, class T, size_t... kIndex>
SG_INLINE Terms<Map> MapElement(const Map& map, void* const* data, int64_t i,
                                std::index_sequence<kIndex...>) {
  const double x[] = {LoadAsDouble<Map, T, kIndex>(map, data, i)...};
  return {map(x)};
}

template <size_t kCount>
SG_INLINE void AddTerms(std::array<double, kCount>& sums,
                        const std::array<double, kCount>& terms) {
  for (size_t k = 0; k < kCount; ++k) sums[k] += terms[k];
}

// One lane's running sums over the stretch [begin, end).
template <class Map, class T>
SG_INLINE Terms<Map> LaneSums(const Map& map, void* const* data, int64_t begin,
                              int64_t end, int lane) {
  Terms<Map> sums = {};
  for (int64_t i = begin + lane; i < end; i += kLanes) {
    AddTerms(sums, MapElement<Map, T>(map, data, i, kIndices<Map>));
  }
  return sums;
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

// All branches, added in a tree, without zeros past the end.
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

// The cut of a segment into rows, one a chain, and stretches.
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

// The place of a segment's stretch, and of its sum.
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
  return {chain * cut.row + begin, chain * cut.row + end,
          chain * per_chain + cut.first + stretch};
}

// Sum k of the stretch with target t is sums[k * targets + t].
struct StretchSums {
  double* sums;
  int64_t targets;
  int64_t per_chain;
};

// No update before the sums.
struct Nothing {
  template <class T>
  const Nothing& For() const {
    return *this;
  }
};

}  // namespace torch_sgmcmc

#define SG_EACH_ISA "launch/reduce_loop.inl"
#include "random/each_isa.inl"

namespace torch_sgmcmc {

// Writes every chain's k-th sum to out[k * num_chains + chain], after `first`:
// Nothing or BothTypes.
template <class Map, class First = Nothing>
void ReduceOnCpu(const std::vector<Segment>& segments, const Map& map,
                 int64_t num_chains, double* out, Isa isa = ActiveIsa(),
                 const First& first = First()) {
  const Cuts all(segments, num_chains);
  const int64_t targets = num_chains * all.per_chain;
  std::vector<double> sums(kSums<Map> * static_cast<size_t>(targets));
  const StretchSums to{sums.data(), targets, all.per_chain};
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
      const int64_t end_unit =
          std::min(cut.units, (stop - first_chunk[i]) * units);
      WithElement(s.dtype, [&]<class T>(T /*element*/) {
        SG_CALL_ON(isa, ReduceUnits<T>(first.template For<T>(), map, s.data,
                                       cut, from, end_unit, to));
      });
      begin = stop;
      ++i;
    }
  };
  torch::stable::parallel_for(0, first_chunk.back(), kGrain, work);
  for (int64_t i = 0; i < static_cast<int64_t>(kSums<Map>) * num_chains; ++i) {
    out[i] =
        Finish(map, AddInTree(sums.data() + i * all.per_chain, all.per_chain));
  }
}

template <class Map>
double* RowOf(Tensor& out, int64_t row, int64_t num_chains) {
  return static_cast<double*>(out.data_ptr()) +
         row * static_cast<int64_t>(kSums<Map>) * num_chains;
}

struct CpuReducer {
  // Writes every chain's sums to `out`, a float64 tensor: the first of all
  // chains, then the second.
  static void Reduce(const Plan& plan, const auto& map, int64_t num_chains,
                     Tensor& out) {
    ReduceOnCpu(plan.segments(), map, num_chains,
                static_cast<double*>(out.data_ptr()));
  }

  // Writes the sums of the plan's i-th tensor alone to row rows[i] of `out`.
  template <class Map>
  static void ReduceEach(const Plan& plan, const Map& map,
                         const std::vector<int64_t>& rows, int64_t num_chains,
                         Tensor& out) {
    for (size_t i = 0; i < rows.size(); ++i) {
      ReduceOnCpu({plan.segments()[i]}, map, num_chains,
                  RowOf<Map>(out, rows[i], num_chains));
    }
  }

  // Makes an update without noise, and writes sums of the result.
  template <template <class> class Update, class Coefficients, class Map>
  static void UpdateAndReduce(const char* /*op*/, const Plan& plan,
                              const Coefficients& coefficients, const Map& map,
                              Tensor& out) {
    ReduceOnCpu(plan.segments(), map,
                /*num_chains=*/1, static_cast<double*>(out.data_ptr()),
                ActiveIsa(), BothTypes<Update>(coefficients));
  }
};

}  // namespace torch_sgmcmc
