// The CPU loops that find and count values that are not finite, compiled once
// per instruction set (random/isa.h).

template <class T>
bool AnyNonfiniteIn(const void* data, int64_t begin, int64_t end) {
  using Bits = typename BitsOf<T>::Type;
  const Bits* x = static_cast<const Bits*>(data);
  Bits largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    largest = std::max(largest, Magnitude(x[i]));
  }
  return largest >= BitsOf<T>::kInfinity;
}

template <class T>
Nonfinite CountNonfiniteIn(const void* data, int64_t begin, int64_t end) {
  using Bits = typename BitsOf<T>::Type;
  // Counts of a block fit into the elements' width.
  constexpr int64_t kBlock = 4096;
  const Bits* x = static_cast<const Bits*>(data);
  Nonfinite total;
  for (; begin < end; begin += kBlock) {
    const int64_t stop = std::min(end, begin + kBlock);
    Bits nans = 0;
    Bits infinities = 0;
    for (int64_t i = begin; i < stop; ++i) {
      const auto size = Magnitude(x[i]);
      nans = static_cast<Bits>(nans + (size > BitsOf<T>::kInfinity));
      infinities =
          static_cast<Bits>(infinities + (size == BitsOf<T>::kInfinity));
    }
    total.nans += nans;
    total.infinities += infinities;
  }
  return total;
}
