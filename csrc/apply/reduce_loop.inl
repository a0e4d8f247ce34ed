// The CPU loop over stretches of Note [Order of sums], compiled once per
// instruction set (see core/isa.h).

// Updates elements [begin, begin + count), kCount at most.
template <class T, int64_t kCount, class Update>
SG_INLINE void UpdateFew(const Update& update,
                         void* const* data,
                         int64_t begin,
                         int64_t count,
                         Arithmetic<T>* means) {
  if constexpr (!std::is_same_v<Update, Nothing>) {
    constexpr auto kIndices =
        std::make_index_sequence<std::tuple_size_v<decltype(Update::kRoles)>>();
    static constexpr float kNoNoise[kCount] = {};
    UpdateElements<Update, T>(
        update, data, begin, count, kNoNoise, means, kIndices);
  }
}

// Of an array that a map reads, the elements from `begin` on.
template <class Map, class T, size_t kIndex>
SG_INLINE auto* ReadAt(void* const* data, int64_t begin, Arithmetic<T>* means) {
  constexpr Role kRole = Map::kRoles[kIndex];
  if constexpr (Map::kReads[kIndex]) {
    return ArrayAt<kRole, T>(data[SlotOf(kRole, kIndex)], begin, means);
  } else {
    return static_cast<Stored<kRole, T>*>(nullptr);
  }
}

// Writes the terms of elements [begin, begin + kCount).
template <class Map, class T, int64_t kCount, size_t... kIndex>
SG_INLINE void MapBlock(const Map& map,
                        void* const* data,
                        int64_t begin,
                        Arithmetic<T>* means,
                        double (*terms)[kCount],
                        std::index_sequence<kIndex...>) {
  const auto arrays =
      std::make_tuple(ReadAt<Map, T, kIndex>(data, begin, means)...);
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < kCount; ++i) {
    const double x[] = {
        ElementAsDouble<Map, T, kIndex>(std::get<kIndex>(arrays), i)...};
    const Terms<Map> all = {map(x)};
    for (size_t k = 0; k < kSums<Map>; ++k) terms[k][i] = all[k];
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
  const auto prefetch = [&](auto* array) {
    if (array != nullptr) PrefetchTerms<kCount>(array);
  };
  (prefetch(ReadAt<Map, T, kIndex>(data, begin, nullptr)), ...);
}

// Elements that are mapped at a time.
constexpr int64_t kBlock = 16 * kLanes;

template <class T, class Update, class Map>
Terms<Map> ReduceStretch(const Update& update,
                         const Map& map,
                         void* const* data,
                         int64_t begin,
                         int64_t end,
                         Arithmetic<T>* means) {
  constexpr auto kIndices = MapIndices<Map>();
  Terms<Map> result = {};
  if (end - begin <= kLanes) {  // a lane each: they are added in order
    UpdateFew<T, kLanes>(update, data, begin, end - begin, means);
    for (int64_t i = begin; i < end; ++i) {
      AddTerms(result, MapElement<Map, T>(map, data, i, kIndices));
    }
    return result;
  }
  // All lanes as one vector, which the compiler cuts into registers.
  using Vector = double __attribute__((vector_size(kLanes * sizeof(double))));
  constexpr int64_t kAhead = kBlock;  // arrives while this one is added
  constexpr size_t kCount = kSums<Map>;
  alignas(Vector) double terms[kCount][kBlock];
  Vector sums[kCount] = {};
  for (; begin + kBlock <= end; begin += kBlock) {
    PrefetchTerms<Map, T, kBlock>(data, begin + kAhead, kIndices);
    UpdateFew<T, kBlock>(update, data, begin, kBlock, means);
    MapBlock<Map, T, kBlock>(map, data, begin, means, terms, kIndices);
    for (size_t k = 0; k < kCount; ++k) {
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        sums[k] += *reinterpret_cast<const Vector*>(terms[k] + i);
      }
    }
  }
  UpdateFew<T, kBlock>(update, data, begin, end - begin, means);
  alignas(Vector) double lanes[kCount][kLanes];
  memcpy(lanes, sums, sizeof sums);
  for (int l = 0; begin < end; ++begin, l = (l + 1) % kLanes) {
    const Terms<Map> x = MapElement<Map, T>(map, data, begin, kIndices);
    for (size_t k = 0; k < kCount; ++k) lanes[k][l] += x[k];
  }
  for (size_t k = 0; k < kCount; ++k) result[k] = AddLanes(lanes[k]);
  return result;
}

// Sums of the stretches [begin, end) of a segment.
template <class T, class Update, class Map>
void ReduceUnits(const Update& update,
                 const Map& shared_map,
                 void* const* shared_data,
                 const Cut& cut,
                 int64_t begin,
                 int64_t end,
                 const StretchSums& to) {
  const Map map = shared_map;  // copies that no store can alias
  void* data[kMaxArguments];
  std::copy_n(shared_data, kMaxArguments, data);
  // The update's and the map's are the same.
  alignas(64) Arithmetic<T> means[kBlock];
  FillMeans(map, data, means);
  if constexpr (!std::is_same_v<Update, Nothing>) {
    FillMeans(update, data, means);
  }
  for (int64_t unit = begin; unit < end; ++unit) {
    const Unit u = UnitAt(cut, to.per_chain, unit);
    const Terms<Map> sums =
        ReduceStretch<T>(update, map, data, u.begin, u.end, means);
    for (size_t k = 0; k < kSums<Map>; ++k) {
      to.sums[static_cast<int64_t>(k) * to.targets + u.target] = sums[k];
    }
  }
}
