// The CPU loop over stretches of Note [Order of sums], compiled once per
// instruction set (see core/isa.h).

// Writes the terms of elements [begin, begin + kCount).
template <class Map, class T, int64_t kCount>
SG_INLINE void MapBlock(const Map& map,
                        void* const* data,
                        int64_t begin,
                        double* terms) {
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < kCount; ++i) {
    terms[i] = MapElement<Map, T>(map, data, begin + i, MapIndices<Map>());
  }
}

// Asks for the memory of kCount elements of one array.
template <int64_t kCount, class Element>
SG_INLINE void PrefetchTerms(const Element* array) {
  constexpr int64_t kLine = 64 / sizeof(Element);
  SG_UNROLL for (int64_t i = 0; i < kCount; i += kLine) {
    __builtin_prefetch(array + i);
  }
  __asm__ volatile("");  // see PrefetchBlock in apply/cpu_loop.inl
}

// Asks for elements [begin, begin + kCount) of the arrays that are read.
template <class Map, class T, int64_t kCount, size_t... kIndex>
SG_INLINE void PrefetchTerms(void* const* data,
                             int64_t begin,
                             std::index_sequence<kIndex...>) {
  ((Map::kReads[kIndex]
        ? PrefetchTerms<kCount>(
              static_cast<const Stored<Map::kRoles[kIndex], T>*>(data[kIndex]) +
              begin)
        : static_cast<void>(0)),
   ...);
}

template <class Map, class T>
double ReduceStretch(const Map& map,
                     void* const* data,
                     int64_t begin,
                     int64_t end) {
  constexpr auto kIndices = MapIndices<Map>();
  if (end - begin <= kLanes) {  // a lane each: they are added in order
    double sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      sum += MapElement<Map, T>(map, data, i, kIndices);
    }
    return sum;
  }
  // All lanes as one vector, which the compiler cuts into registers.
  using Vector = double __attribute__((vector_size(kLanes * sizeof(double))));
  constexpr int64_t kBlock = 16 * kLanes;
  constexpr int64_t kAhead = kBlock;  // arrives while this one is added
  alignas(Vector) double terms[kBlock];
  Vector sums = {};
  for (; begin + kBlock <= end; begin += kBlock) {
    PrefetchTerms<Map, T, kBlock>(data, begin + kAhead, kIndices);
    MapBlock<Map, T, kBlock>(map, data, begin, terms);
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      sums += *reinterpret_cast<const Vector*>(terms + i);
    }
  }
  alignas(Vector) double lanes[kLanes];
  memcpy(lanes, &sums, sizeof sums);
  for (; begin + kLanes <= end; begin += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      lanes[l] += MapElement<Map, T>(map, data, begin + l, kIndices);
    }
  }
  for (int l = 0; begin < end; ++begin, ++l) {
    lanes[l] += MapElement<Map, T>(map, data, begin, kIndices);
  }
  return AddLanes(lanes);
}

// Sums of the stretches [begin, end) of a segment.
template <class Map, class T>
void ReduceUnits(const Map& shared_map,
                 void* const* shared_data,
                 const Cut& cut,
                 int64_t per_chain,
                 int64_t begin,
                 int64_t end,
                 double* sums) {
  const Map map = shared_map;  // copies that no store can alias
  void* data[kMaxArguments];
  std::copy_n(shared_data, kMaxArguments, data);
  for (int64_t unit = begin; unit < end; ++unit) {
    const Unit u = UnitAt(cut, per_chain, unit);
    sums[u.target] = ReduceStretch<Map, T>(map, data, u.begin, u.end);
  }
}
