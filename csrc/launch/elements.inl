// The innermost loop of updates, compiled once per instruction set: reads a few
// elements of every array, updates and writes them, in one pass over memory.

template <Role role, class T>
SG_INLINE Arithmetic<T> LoadElement(const Stored<role, T>* array,
                                    const float* masters, int64_t i) {
  if constexpr (kHasMaster<role, T>) {
    return ValueOf(array[i], masters[i]);
  } else if constexpr (IsRead(role)) {
    return static_cast<Arithmetic<T>>(array[i]);
  } else {
    return 0;
  }
}

template <Role role, class T>
SG_INLINE void StoreElement(Stored<role, T>* array, float* masters, int64_t i,
                            Arithmetic<T> x) {
  if constexpr (IsWritten(role)) {
    if constexpr (kHasMaster<role, T>) masters[i] = x;
    array[i] = static_cast<Stored<role, T>>(x);
  }
}

// Elements from `begin` on; without an array of prior means, of a block filled
// with the number.
template <Role role, class T>
SG_INLINE Stored<role, T>* ArrayAt(void* array, int64_t begin,
                                   [[maybe_unused]] Arithmetic<T>* means) {
  if constexpr (role == Role::kPriorMean) {
    if (array == nullptr) return means;
  }
  if constexpr (role == Role::kChainNumbers) begin = 0;
  return static_cast<Stored<role, T>*>(array) + begin;
}

// That block.
template <class Update, class Real, size_t kCount>
SG_INLINE void FillMeans(const Update& update, void* const* data,
                         Real (&means)[kCount]) {
  if constexpr (kHasPriorMean<Update>) {
    if (data[kPriorMeans] != nullptr) return;
    const Real mean = static_cast<Real>(update.prior_mean());
    for (Real& m : means) m = mean;
  }
}

template <class Update, class T, size_t... kIndex>
void UpdateElements(const Update& shared_update, void* const* data,
                    int64_t begin, int64_t count, const float* noise,
                    Arithmetic<T>* means, std::index_sequence<kIndex...>) {
  using Real = Arithmetic<T>;
  const Update update = shared_update;  // a copy that no store can alias
  constexpr auto kRoles = Update::kRoles;
  const auto arrays = std::make_tuple(ArrayAt<kRoles[kIndex], T>(
      data[SlotOf(kRoles[kIndex], kIndex)], begin, means)...);
  float* masters = nullptr;
  if constexpr ((kHasMaster<kRoles[kIndex], T> || ...)) {
    masters = static_cast<float*>(data[kMasters]) + begin;
  }
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < count; ++i) {
    Real x[sizeof...(kIndex)] = {LoadElement<kRoles[kIndex], T>(
        std::get<kIndex>(arrays), masters, i)...};
    update(x, static_cast<Real>(noise[i]));
    (StoreElement<kRoles[kIndex], T>(std::get<kIndex>(arrays), masters, i,
                                     x[kIndex]),
     ...);
  }
}
