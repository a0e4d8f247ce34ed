// The CPU loop over stretches of Note [Order of sums], compiled once per
// instruction set (see random/isa.h).

// Elements that are mapped at a time: gcc then unrolls the loop over their
// terms and keeps sums in registers.
constexpr int64_t kBlock = 16 * kLanes;

template <class Map, class T, size_t kIndex>
SG_INLINE auto* ReadAt(void* const* data, int64_t begin, Arithmetic<T>* means) {
  constexpr Role kRole = Map::kRoles[kIndex];
  if constexpr (Map::kReads[kIndex]) {
    return ArrayAt<kRole, T>(data[SlotOf(kRole, kIndex)], begin, means);
  } else {
    return static_cast<Stored<kRole, T>*>(nullptr);
  }
}

// Prefetches kBlock elements of one array.
template <class Element>
SG_INLINE void PrefetchArray(const Element* array) {
  if (array == nullptr) return;
  constexpr int64_t kLine = 64 / sizeof(Element);
  SG_UNROLL for (int64_t i = 0; i < kBlock; i += kLine) {
    __builtin_prefetch(array + i);
  }
  __asm__ volatile("");  // see PrefetchBlock in launch/cpu_loop.inl
}

// An update and a map for parameters of type T, and a block of prior means.
template <class T, class Update, class Map>
struct TermsOfUpdated {
  const Update& update;
  const Map& map;
  Arithmetic<T> (&means)[kBlock];

  // See BlockTerms.
  template <size_t... kIndex>
  SG_INLINE void Write(void* const* data, int64_t begin, int64_t count,
                       double (*terms)[kBlock],
                       std::index_sequence<kIndex...> /*all*/) const {
    if (count == kBlock) {  // the next one arrives while this one is added
      (PrefetchArray(ReadAt<Map, T, kIndex>(data, begin + kBlock, nullptr)),
       ...);
    }
    if constexpr (!std::is_same_v<Update, Nothing>) {
      static constexpr float kNoNoise[kBlock] = {};
      UpdateElements<Update, T>(update, data, begin, count, kNoNoise, means,
                                kIndices<Update>);
    }
    const Map own = map;  // a copy that no store can alias
    const auto arrays =
        std::make_tuple(ReadAt<Map, T, kIndex>(data, begin, means)...);
    const auto write = [&](int64_t i) {
      const double x[] = {
          ElementAsDouble<Map, T, kIndex>(std::get<kIndex>(arrays), i)...};
      const Terms<Map> all = {own(x)};
      for (size_t k = 0; k < kSums<Map>; ++k) terms[k][i] = all[k];
    };
    if (count < kBlock) {
      for (int64_t i = 0; i < count; ++i) write(i);
      return;
    }
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (int64_t i = 0; i < kBlock; ++i) write(i);
  }
};

// Updates elements [begin, begin + count), at most kBlock, and writes their
// terms. The loop is compiled once for each number of sums.
struct BlockTerms {
  const void* of;
  void (*write)(const void* of, void* const* data, int64_t begin, int64_t count,
                double (*terms)[kBlock]);
};

// Sums of the stretch [begin, end).
template <size_t kCount>
__attribute__((noinline)) std::array<double, kCount> ReduceStretch(
    const BlockTerms& block, void* const* data, int64_t begin, int64_t end) {
  // All lanes as one vector.
  using Vector = double __attribute__((vector_size(kLanes * sizeof(double))));
  alignas(Vector) double terms[kCount][kBlock];
  Vector sums[kCount] = {};
  const auto add = [&](int64_t count) {
    for (size_t k = 0; k < kCount; ++k) {
      for (int64_t i = 0; i < count; i += kLanes) {
        sums[k] += *reinterpret_cast<const Vector*>(terms[k] + i);
      }
    }
  };
  for (; begin + kBlock <= end; begin += kBlock) {
    block.write(block.of, data, begin, kBlock, terms);
    add(kBlock);
  }
  if (begin < end) {
    const int64_t count = end - begin;
    block.write(block.of, data, begin, count, terms);
    // Some lanes have no element left.
    const int64_t rest = -count & (kLanes - 1);
    for (size_t k = 0; k < kCount; ++k) {
      std::fill_n(terms[k] + count, rest, 0.0);
    }
    add(count);
  }
  alignas(Vector) double lanes[kCount][kLanes];
  memcpy(lanes, sums, sizeof sums);
  std::array<double, kCount> result = {};
  for (size_t k = 0; k < kCount; ++k) result[k] = AddLanes(lanes[k]);
  return result;
}

// Sums of the stretches [begin, end) of a segment.
template <class T, class Update, class Map>
void ReduceUnits(const Update& update, const Map& map, void* const* data,
                 const Cut& cut, int64_t begin, int64_t end,
                 const StretchSums& to) {
  // The update's and the map's are the same.
  alignas(64) Arithmetic<T> means[kBlock];
  FillMeans(map, data, means);
  if constexpr (!std::is_same_v<Update, Nothing>) {
    FillMeans(update, data, means);
  }
  using Of = TermsOfUpdated<T, Update, Map>;
  const Of of{update, map, means};
  const BlockTerms block{
      &of, [](const void* self, void* const* arrays, int64_t at, int64_t count,
              double(*terms)[kBlock]) {
        static_cast<const Of*>(self)->Write(arrays, at, count, terms,
                                            kIndices<Map>);
      }};
  for (int64_t unit = begin; unit < end; ++unit) {
    const Unit u = UnitAt(cut, to.per_chain, unit);
    const auto sums = ReduceStretch<kSums<Map>>(block, data, u.begin, u.end);
    for (size_t k = 0; k < kSums<Map>; ++k) {
      to.sums[static_cast<int64_t>(k) * to.targets + u.target] = sums[k];
    }
  }
}
