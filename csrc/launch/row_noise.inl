// The noise of rows (Note [Rows of shards] in launch/plan.h) on the CPU,
// compiled once per instruction set (see random/isa.h).

// Numbers the quads of a segment's rows. All rows get equally many, so that no
// branch is needed; a row's last may have no element. Needs SpansLittle().
class RowQuads {
 public:
  // Begins with the quad of an element.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  SG_INLINE RowQuads(const Segment& s, int64_t begin)
      : base_(s.offset / 4), row_quads_(CountIn(s)) {
    const int64_t row = begin / s.row;
    // Elements are numbered from that quad's first on, in 32 bits.
    const int64_t skip = static_cast<int64_t>(s.offset % 4) + row * s.pitch;
    const int64_t first = (skip % 4 + begin % s.row) / 4;
    uint32_t index[Lanes::kQuads];
    uint32_t column[Lanes::kQuads];
    for (int64_t i = 0; i < Lanes::kQuads; ++i) {
      const int64_t quad = first + i % 4 * (Lanes::kQuads / 4) + i / 4;
      const int64_t j = quad % row_quads_;
      index[i] =
          static_cast<uint32_t>(skip + quad / row_quads_ * s.pitch + 4 * j);
      column[i] = static_cast<uint32_t>(j);
    }
    memcpy(&index_, index, sizeof index_);
    memcpy(&column_, column, sizeof column_);
    const int64_t columns = Lanes::kQuads % row_quads_;
    const int64_t rows = Lanes::kQuads / row_quads_;
    columns_ = static_cast<uint32_t>(columns);
    gap_ = static_cast<uint32_t>(s.pitch - 4 * row_quads_);
    elements_ = static_cast<uint32_t>(rows * s.pitch + 4 * columns) + gap_;
  }

  // The most quads of a row.
  static int64_t CountIn(const Segment& s) {
    const int64_t step = s.pitch % 4 == 0 ? 4 : s.pitch % 2 == 0 ? 2 : 1;
    const int64_t skip = static_cast<int64_t>(s.offset) % step + 4 - step;
    return (skip + s.row + 3) / 4;
  }

  int64_t in_row() const { return row_quads_; }
  uint32_t high() const { return static_cast<uint32_t>(base_ >> 32); }

  SG_INLINE Lanes::U32 Next() {
    const auto low = static_cast<uint32_t>(base_);
    const auto count = static_cast<uint32_t>(row_quads_);
    const Lanes::U32 quads =
        Lanes::Subtract(Lanes::ShiftRight(index_, 2), -low);
    // Negative where no other row ends.
    const Lanes::U32 column = Lanes::Subtract(column_, count - columns_);
    index_ = Lanes::AddIfNegative(Lanes::Subtract(index_, -elements_), -gap_,
                                  column);
    column_ = Lanes::AddIfNegative(column, count, column);
    return quads;
  }

 private:
  // An element of each of the next quads, and its place in its row.
  Lanes::U32 index_;
  Lanes::U32 column_;
  uint64_t base_;
  int64_t row_quads_;
  // The steps to the following quads, the latter if one more row ends.
  uint32_t columns_;
  uint32_t elements_;
  uint32_t gap_;  // from the end of a row's quads to the next row's
};

// The numbers of rows' quads that belong to elements, as bits, which repeat
// after four rows.
class KeptNoise {
 public:
  // Begins at an element; all rows have `row_quads` quads.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  KeptNoise(const Segment& s, int64_t begin, int64_t row_quads)
      : period_(static_cast<uint64_t>(row_quads) * (row_quads < 4 ? 64 : 16)) {
    memset(kept_, 0xff, sizeof kept_);
    const int64_t column = begin % s.row;
    const auto skip = static_cast<int64_t>(IndexOf(s, begin - column) % 4);
    const int64_t first = (skip + column) / 4 * 4;
    const int64_t bits = 4 * row_quads;
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t row = bits * i - first;
      const int64_t element = row + (skip + i * s.pitch) % 4;
      Drop(row, element, 4 * bits);
      Drop(element + s.row, row + bits, 4 * bits);
    }
    const int64_t bytes = bits / 2;
    const auto read = static_cast<int64_t>((period_ + 2 * kWordBits) / 8);
    for (int64_t i = bytes; i < read; ++i) {
      kept_[i] = kept_[i - bytes];
    }
    kept_[0] &= static_cast<uint8_t>(0xffU << (skip + column) % 4);
  }

  // The bits of the next Lanes::kQuads quads.
  SG_INLINE uint64_t Next() {
    uint64_t word;
    memcpy(&word, kept_ + at_ / 8, sizeof word);
    word >>= at_ % 8;
    at_ += uint64_t{4} * Lanes::kQuads;
    // Not into the first word, where bits are skipped only once.
    if (at_ >= kWordBits + period_) at_ -= period_;
    return word;
  }

 private:
  static constexpr uint64_t kWordBits = 64;
  // FillsBlocks() has all rows of 8 * kNoiseBlock elements.
  static constexpr int64_t kMostQuads = 2 * kNoiseBlock + 2;

  // Bits [begin, end), modulo the period.
  void Drop(int64_t begin, int64_t end, int64_t period) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t bit = (i + period) % period;
      kept_[bit / 8] &= static_cast<uint8_t>(~(1U << bit % 8));
    }
  }

  const uint64_t period_;  // a word at least
  uint64_t at_ = 0;
  uint8_t kept_[2 * kMostQuads + 2 * kWordBits / 8];
};

// The noise of a segment's elements. Blocks continue from row to row, which
// wastes nothing on narrow rows; numbers outside of rows are skipped. Needs
// SpansLittle() and not FillsBlocks().
template <template <int> class Noise>
class RowNoise {
 public:
  static constexpr int64_t kBlocks = 8;  // of a batch
  // Next() writes up to so many floats more than it says.
  static constexpr int64_t kBeyond = Lanes::kQuads;

  using Ahead = void (*)(void* const* data, int64_t begin);

  __attribute__((noinline))
  RowNoise(const Segment& s, int64_t begin, const NoiseStream& stream)
      : quads_(s, begin),
        source_(stream, quads_),
        data_(s.data),
        begin_(begin),
        kept_(s, begin, quads_.in_row()),
        are_quads_(IsOfQuads(s) && begin % 4 == 0) {}

  // Writes the next numbers, at least `wanted` unless kBlocks blocks have
  // fewer, and returns their count. Calls prefetch(data, first element) before
  // a block.
  __attribute__((noinline)) int64_t Next(float* out, int64_t wanted,
                                         Ahead prefetch) {
    float* to = out;
    // Copies, which do not alias `out`.
    RowQuads quads = quads_;
    NoiseSource<Noise> source = source_;
    const int64_t blocks =
        std::min(kBlocks, (wanted + kNoiseBlock - 1) / kNoiseBlock);
    for (int64_t i = 0; i < blocks; ++i) {
      prefetch(data_, begin_ + (to - out));
      if (are_quads_) {
        source.Next(quads,
                    [&](const Lanes::F32* z) { to = StoreQuads(to, z); });
      } else {
        source.Next(quads, [&](const Lanes::F32* z) {
          to = Lanes::StoreKept(to, z, kept_.Next());
        });
      }
    }
    quads_ = quads;
    source_ = source;
    begin_ += to - out;
    return to - out;
  }

 private:
  RowQuads quads_;
  NoiseSource<Noise> source_;
  void* const* data_;
  int64_t begin_;  // the first element of the next batch
  KeptNoise kept_;
  const bool are_quads_;
};
