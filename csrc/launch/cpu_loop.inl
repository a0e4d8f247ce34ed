// The CPU loop over one stretch of one parameter, compiled once per instruction
// set (see random/isa.h): make a block of noise, then read gradients, update
// and write parameters, in one pass over memory.

// Prefetches kNoiseBlock elements of one array.
template <bool is_written, class Element>
SG_INLINE void PrefetchBlock(const Element* array) {
  constexpr int64_t kLine = 64 / sizeof(Element);
  SG_UNROLL for (int64_t i = 0; i < kNoiseBlock; i += kLine) {
    __builtin_prefetch(array + i, is_written ? 1 : 0);
  }
  // gcc drops calls of a function that only prefetches.
  __asm__ volatile("");
}

template <Role role, class T>
SG_INLINE void PrefetchArgument(const void* array, const void* masters,
                                int64_t begin) {
  if (role == Role::kPriorMean && array == nullptr) return;
  if (role == Role::kChainNumbers) return;
  PrefetchBlock<IsWritten(role)>(static_cast<const Stored<role, T>*>(array) +
                                 begin);
  if constexpr (kHasMaster<role, T>) {
    PrefetchBlock<IsWritten(role)>(static_cast<const float*>(masters) + begin);
  }
}

// Prefetches [begin, begin + kNoiseBlock) of all arrays, while noise is made.
template <class Update, class T, size_t... kIndex>
SG_INLINE void Prefetch(void* const* data, int64_t begin,
                        std::index_sequence<kIndex...>) {
  (PrefetchArgument<Update::kRoles[kIndex], T>(
       data[SlotOf(Update::kRoles[kIndex], kIndex)], data[kMasters], begin),
   ...);
}

// An update's part of a segment's loop, which is long and compiled once for
// each kind of noise, not for each update and type.
struct ElementsOfUpdate {
  const void* context;
  bool needs_noise;
  // Updates `count` elements from `begin` on.
  void (*run)(const void* context, void* const* data, int64_t begin,
              int64_t count, const float* noise);
  void (*prefetch)(void* const* data, int64_t begin);
};

// Floats of a cache line, and elements that are updated at a time.
constexpr int64_t kFloatsOfLine = 16;
constexpr int64_t kBuffer = RowNoise<BoxMuller>::kBlocks * kNoiseBlock;
constexpr int64_t kMostElements = kFloatsOfLine + kBuffer;

template <template <int> class Noise>
__attribute__((noinline)) void RunElements(const ElementsOfUpdate& of,
                                           const Segment& segment,
                                           int64_t begin, int64_t end,
                                           const NoiseStream& stream) {
  alignas(64) float noise[kMostElements + RowNoise<Noise>::kBeyond];
  const auto run = [&](int64_t at, int64_t count, const float* z) {
    of.run(of.context, segment.data, at, count, z);
  };

  if (!of.needs_noise) {
    for (float& z : noise) z = 0.0f;
    for (int64_t i = begin; i < end; i += kBuffer) {
      run(i, std::min(kBuffer, end - i), noise);
    }
    return;
  }
  if (SpansLittle(segment) && !FillsBlocks(segment)) {
    RowNoise<Noise> numbers(segment, begin, stream);
    int64_t kept = 0;
    while (begin < end) {
      kept += numbers.Next(noise + kept, end - begin - kept, of.prefetch);
      if (kept >= end - begin) return run(begin, end - begin, noise);
      const int64_t count = kept / kFloatsOfLine * kFloatsOfLine;
      run(begin, count, noise);
      memcpy(noise, noise + count, kFloatsOfLine * sizeof *noise);
      kept -= count;
      begin += count;
    }
    return;
  }
  // Blocks begin as in the numbering, or at a row's first quad.
  const uint64_t mask = StartsAtQuads(segment) ? 3 : kNoiseBlock - 1;
  // Incremented, since a division for each row is slow.
  uint64_t index = IndexOf(segment, begin);
  int64_t row_end = RowEnd(segment, begin);
  auto skip = static_cast<int64_t>(index & mask);
  uint64_t quad = (index & ~mask) / 4;
  NoiseSource<Noise> source(stream, quad);
  while (begin < end) {
    const int64_t stop = std::min(end, row_end);
    const int64_t count = std::min(kBuffer - skip, stop - begin);
    const int64_t done = begin + count;
    index += static_cast<uint64_t>(count);
    if (done == row_end) {
      index += static_cast<uint64_t>(segment.pitch - segment.row);
    }
    for (int64_t b = 0; b < skip + count; b += kNoiseBlock) {
      of.prefetch(segment.data, std::max(begin, begin - skip + b));
      const bool jumps = done == row_end && b + kNoiseBlock >= skip + count;
      const uint64_t then = jumps ? (index & ~mask) / 4 : quad + kQuadBlock;
      source.Next(noise + b, quad, then);
      quad = then;
    }
    run(begin, count, noise + skip);
    skip = 0;
    if (done == row_end) {
      skip = static_cast<int64_t>(index & mask);
      row_end += segment.row;
    }
    begin = done;
  }
}

// Updates elements [begin, end) of a segment.
template <class Update, class T>
void RunSegment(const Update& update, const Segment& segment, int64_t begin,
                int64_t end, const NoiseStream& stream) {
  struct Context {
    const Update& update;
    Arithmetic<T>* means;
  };
  alignas(64) Arithmetic<T> means[kHasPriorMean<Update> ? kMostElements : 1];
  FillMeans(update, segment.data, means);
  const Update own = OfChain(update, segment.data, segment.chain);
  const Context context{own, means};
  const ElementsOfUpdate elements{
      &context, NeedsNoise(update),
      [](const void* of, void* const* data, int64_t at, int64_t count,
         const float* z) {
        const auto& c = *static_cast<const Context*>(of);
        UpdateElements<Update, T>(c.update, data, at, count, z, c.means,
                                  kIndices<Update>);
      },
      [](void* const* data, int64_t at) {
        Prefetch<Update, T>(data, at, kIndices<Update>);
      }};
  if constexpr (kTakesUniforms<Update>) {
    RunElements<Uniforms>(elements, segment, begin, end, stream);
  } else {
    RunElements<BoxMuller>(elements, segment, begin, end, stream);
  }
}
