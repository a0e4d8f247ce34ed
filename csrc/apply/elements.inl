// The innermost loop of updates, compiled once per instruction set: reads a few
// elements of every array, updates and writes them, in one pass over memory.

template <class Update, class T, size_t... kIndex>
void UpdateElements(const Update& shared_update,
                    void* const* data,
                    int64_t begin,
                    int64_t count,
                    const float* noise,
                    std::index_sequence<kIndex...>) {
  using Real = Arithmetic<T>;
  const Update update = shared_update;  // a copy that no store can alias
  constexpr auto kRoles = Update::kRoles;
  const auto arrays = std::make_tuple(
      static_cast<Stored<kRoles[kIndex], T>*>(data[kIndex]) + begin...);
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < count; ++i) {
    Real x[sizeof...(kIndex)] = {
        (IsRead(kRoles[kIndex]) ? static_cast<Real>(std::get<kIndex>(arrays)[i])
                                : Real(0))...};
    update(x, static_cast<Real>(noise[i]));
    ((IsWritten(kRoles[kIndex])
          ? static_cast<void>(
                std::get<kIndex>(arrays)[i] =
                    static_cast<Stored<kRoles[kIndex], T>>(x[kIndex]))
          : static_cast<void>(0)),
     ...);
  }
}
