// A thread's work on the GPU: tables of segments, quads in, update, quads out.
//
// Functions for host and device: launch/cuda.cuh launches them, and CPU tests
// run them as loops over blocks and threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "launch/chunks.h"
#include "launch/plan.h"
#include "ops/roles.h"
#include "random/macros.h"
#include "random/portable_noise.h"

namespace torch_sgmcmc {

// Kernel arguments may take 4 KiB on every architecture.
constexpr int kMaxSegments = 44;

// The segments of one launch, of one dtype; entries beyond `count` are not set.
// NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
struct SegmentTable {
  void* data[kMaxArguments][kMaxSegments];
  int64_t numel[kMaxSegments];
  uint64_t offset[kMaxSegments];
  int64_t first_chunk[kMaxSegments];
  int count = 0;
  int64_t num_chains = 0;  // each of numel elements, Note [Chains side by side]
};
static_assert(sizeof(SegmentTable) < 3900);

// Calls use(row) for each row of a segment, as a segment.
void ForEachRow(const Segment& s, const auto& use) {
  if (s.row == 0) return use(s);
  Segment row = s;
  row.numel = s.row;
  row.row = 0;
  for (int64_t begin = 0; begin < s.numel; begin += s.row) {
    row.offset = IndexOf(s, begin);
    for (int j = 0; j < kMaxArguments; ++j) {
      if (s.data[j] == nullptr) continue;
      row.data[j] = static_cast<char*>(s.data[j]) + begin * s.bytes[j];
    }
    use(row);
  }
}

// Calls launch(table, blocks) for all segments of one dtype, with few tables.
void ForEachTable(const std::vector<Segment>& segments, ScalarType dtype,
                  const auto& launch) {
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  SegmentTable table;
  int64_t blocks = 0;
  const auto add = [&](const Segment& s) {
    const int64_t numel = s.numel / std::max<int64_t>(1, s.num_chains);
    const int64_t more = ChunkCount(numel, s.offset);
    if (table.count == kMaxSegments ||
        (table.count > 0 && blocks + more > kMaxBlocks)) {
      launch(table, blocks);
      table.count = 0;
      blocks = 0;
    }
    for (int j = 0; j < kMaxArguments; ++j) {
      table.data[j][table.count] = s.data[j];
    }
    table.numel[table.count] = numel;
    table.num_chains = s.num_chains;
    table.offset[table.count] = s.offset;
    table.first_chunk[table.count] = blocks;
    ++table.count;
    blocks += more;
  };
  for (const Segment& s : segments) {
    if (s.dtype == dtype) ForEachRow(s, add);
  }
  if (table.count > 0) launch(table, blocks);
}

// Calls launch(element, table, blocks) for all segments, with few tables, each
// of one dtype.
void ForEachTable(const std::vector<Segment>& segments, const auto& launch) {
  for (const ScalarType dtype : {ScalarType::Double, ScalarType::Float,
                                 ScalarType::BFloat16, ScalarType::Half}) {
    WithElement(dtype, [&](auto element) {
      ForEachTable(segments, dtype,
                   [&](const SegmentTable& table, int64_t blocks) {
                     launch(element, table, blocks);
                   });
    });
  }
}

template <class T>
struct alignas(4 * sizeof(T)) Quad {
  T value[4];
};

template <Role role, class T>
SG_INLINE void LoadQuad(const void* data, const QuadSpan& span, bool whole,
                        Arithmetic<T> (&out)[4]) {
  if constexpr (IsRead(role)) {
    using Element = Stored<role, T>;
    const Element* p = static_cast<const Element*>(data) + span.origin;
    if (whole) {
      const Quad<Element> q = *reinterpret_cast<const Quad<Element>*>(p);
      SG_UNROLL for (int w = 0; w < 4; ++w) {
        out[w] = static_cast<Arithmetic<T>>(q.value[w]);
      }
    } else {
      SG_UNROLL for (int w = 0; w < 4; ++w) {
        if (span.begin <= w && w < span.end) {
          out[w] = static_cast<Arithmetic<T>>(p[w]);
        }
      }
    }
  }
}

template <Role role, class T>
SG_INLINE void StoreQuad(void* data, const QuadSpan& span, bool whole,
                         const Arithmetic<T> (&in)[4]) {
  if constexpr (IsWritten(role)) {
    using Element = Stored<role, T>;
    Element* p = static_cast<Element*>(data) + span.origin;
    if (whole) {
      Quad<Element> q;
      SG_UNROLL for (int w = 0; w < 4; ++w) {
        q.value[w] = static_cast<Element>(in[w]);
      }
      *reinterpret_cast<Quad<Element>*>(p) = q;
    } else {
      SG_UNROLL for (int w = 0; w < 4; ++w) {
        if (span.begin <= w && w < span.end) {
          p[w] = static_cast<Element>(in[w]);
        }
      }
    }
  }
}

template <Role role, class T>
SG_INLINE bool IsAligned(const void* data, int64_t origin) {
  using Element = Stored<role, T>;
  return reinterpret_cast<uintptr_t>(static_cast<const Element*>(data) +
                                     origin) %
             sizeof(Quad<Element>) ==
         0;
}

template <Role role, class T>
SG_INLINE void LoadArgument([[maybe_unused]] const auto& update,
                            const void* data, const void* masters,
                            const QuadSpan& span, bool whole,
                            Arithmetic<T> (&out)[4]) {
  if constexpr (role == Role::kPriorMean) {
    // One by one: whole quads would add a tenth to the library's size.
    const auto* p = static_cast<const Arithmetic<T>*>(data);
    SG_UNROLL for (int w = 0; w < 4; ++w) {
      const bool has_own = p != nullptr && span.begin <= w && w < span.end;
      out[w] = has_own ? p[span.origin + w] : update.prior_mean();
    }
    return;
  }
  LoadQuad<role, T>(data, span, whole, out);
  if constexpr (kHasMaster<role, T>) {
    float master[4] = {};
    LoadQuad<Role::kMaster, T>(masters, span, whole, master);
    SG_UNROLL for (int w = 0; w < 4; ++w) {
      out[w] = ValueOf(static_cast<T>(out[w]), master[w]);
    }
  }
}

template <Role role, class T>
SG_INLINE void StoreArgument(void* data, void* masters, const QuadSpan& span,
                             bool whole, const Arithmetic<T> (&in)[4]) {
  StoreQuad<role, T>(data, span, whole, in);
  if constexpr (IsWritten(role) && kHasMaster<role, T>) {
    StoreQuad<Role::kMaster, T>(masters, span, whole, in);
  }
}

template <Role role, class T>
SG_INLINE bool AreAligned(const void* data, const void* masters,
                          int64_t origin) {
  if constexpr (role == Role::kPriorMean || role == Role::kChainNumbers) {
    return true;
  }
  if constexpr (kHasMaster<role, T>) {
    if (!IsAligned<Role::kMaster, T>(masters, origin)) return false;
  }
  return IsAligned<role, T>(data, origin);
}

template <class Update, class T, size_t... kIndex>
SG_INLINE void UpdateQuad(const Update& update, void* const* data,
                          const QuadSpan& span, const NoiseStream& stream,
                          std::index_sequence<kIndex...>) {
  using Real = Arithmetic<T>;
  constexpr int kCount = sizeof...(kIndex);
  const bool whole = span.begin == 0 && span.end == 4 &&
                     (AreAligned<Update::kRoles[kIndex], T>(
                          data[SlotOf(Update::kRoles[kIndex], kIndex)],
                          data[kMasters], span.origin) &&
                      ...);
  Real x[kCount][4] = {};
  (LoadArgument<Update::kRoles[kIndex], T>(
       update, data[SlotOf(Update::kRoles[kIndex], kIndex)], data[kMasters],
       span, whole, x[kIndex]),
   ...);
  float noise[4] = {};
  if (NeedsNoise(update)) {
    if constexpr (kTakesUniforms<Update>) {
      portable::QuadNoise<portable::Uniforms>(stream, span.quad, noise);
    } else {
      portable::QuadNormals(stream, span.quad, noise);
    }
  }
  SG_UNROLL for (int w = 0; w < 4; ++w) {
    Real element[kCount] = {x[kIndex][w]...};
    update(element, static_cast<Real>(noise[w]));
    ((x[kIndex][w] = element[kIndex]), ...);
  }
  (StoreArgument<Update::kRoles[kIndex], T>(
       data[SlotOf(Update::kRoles[kIndex], kIndex)], data[kMasters], span,
       whole, x[kIndex]),
   ...);
}

// The work of a thread of a block, for one chain.
template <class Update, class T>
SG_INLINE void UpdateThread(const Update& update, const SegmentTable& table,
                            const NoiseStream& stream, int64_t block,
                            int64_t chain, int thread) {
  const int s = SegmentOf(table.first_chunk, table.count, block);
  void* data[kMaxArguments];
  SG_UNROLL for (int j = 0; j < kMaxArguments; ++j) {
    data[j] = table.data[j][s];
  }
  const Update of_chain = OfChain(update, data, chain);
  NoiseStream own = stream;
  if (NeedsNoise(update) && table.num_chains > 0) {
    own.seed = portable::ChainSeed(own.seed, static_cast<uint64_t>(chain));
  }
  SG_UNROLL for (int k = 0; k < kQuadsPerThread; ++k) {
    QuadSpan span = SpanOf(table.numel[s], table.offset[s],
                           block - table.first_chunk[s], thread, k);
    span.origin += chain * table.numel[s];
    if (span.begin < span.end) {
      UpdateQuad<Update, T>(of_chain, data, span, own, kIndices<Update>);
    }
  }
}

}  // namespace torch_sgmcmc
