// The noise of rows (Note [Rows of shards] in apply/plan.h) on the CPU,
// compiled once per instruction set (see core/isa.h).

// Numbers the quads of a segment's rows, in their order. All rows are given as
// many, so that they are counted without a branch; a row's last may be of none
// of its elements. It takes SpansLittle().
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
      column[i] = static_cast<uint32_t>(j - row_quads_);
    }
    memcpy(&index_, index, sizeof index_);
    memcpy(&column_, column, sizeof column_);
    const int64_t columns = Lanes::kQuads % row_quads_;
    const int64_t rows = Lanes::kQuads / row_quads_;
    columns_ = static_cast<uint32_t>(columns);
    elements_ = static_cast<uint32_t>(rows * s.pitch + 4 * columns);
    to_next_row_ = static_cast<uint32_t>(s.pitch - 4 * row_quads_);
  }

  // As many as any row has elements in.
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
    const Lanes::U32 column = Lanes::Subtract(column_, -columns_);
    index_ = Lanes::AddUnlessNegative(
        Lanes::Subtract(index_, -elements_), to_next_row_, column);
    column_ = Lanes::AddUnlessNegative(column, -count, column);
    return quads;
  }

 private:
  // Of the next quads: an element in each, and how far they are from the row's
  // end (-1: its last quad).
  Lanes::U32 index_;
  Lanes::U32 column_;
  const uint64_t base_;
  const int64_t row_quads_;
  // How far on those that follow are, the latter if no row ends between.
  uint32_t columns_;
  uint32_t elements_;
  uint32_t to_next_row_;
};

// Normals of a segment's elements, in their order. Blocks of noise go on from
// row to row, so that narrow rows leave none half empty; normals of elements
// that quads have outside of their row are taken out.
class RowNormals {
 public:
  static constexpr int64_t kBlocks = 4;  // of a batch
  // Next() writes up to so many floats more than it says.
  static constexpr int64_t kBeyond = int64_t{2} * Lanes::kQuads;

  using Ahead = void (*)(void* const* data, int64_t begin);

  __attribute__((noinline))
  RowNormals(const Segment& s, int64_t begin, const NoiseStream& stream)
      : segment_(s),
        begin_(begin),
        left_(RowEnd(s, begin) - begin),
        skip_(SkipAt(IndexOf(s, begin / s.row * s.row))),
        at_(SkipAt(IndexOf(s, begin))),
        are_quads_(IsOfQuads(s) && begin % 4 == 0),
        quads_(s, begin),
        source_(stream, quads_) {}

  // Writes the next normals, kNormals at most, and returns how many. Before
  // each block, calls prefetch(data, the first element that may be of it).
  __attribute__((noinline)) int64_t Next(float* out, Ahead prefetch) {
    alignas(64) float apart[kNormals + kBeyond];
    // Normals of whole quads follow each other as the elements do.
    float* const normals = are_quads_ ? out : apart;
    for (int64_t i = 0; i < kNormals; i += kNoiseBlock) {
      prefetch(segment_.data, begin_ + i);
      source_.Next(normals + i, quads_);
    }
    const int64_t count = are_quads_ ? kNormals : Gather(normals, out);
    begin_ += count;
    return count;
  }

 private:
  static constexpr int64_t kNormals = kBlocks * kNoiseBlock;

  // Elements that a quad has before this one.
  static int64_t SkipAt(uint64_t index) {
    return static_cast<int64_t>(index % 4);
  }

  // Puts the normals of elements behind each other, and says how many there
  // are.
  SG_INLINE int64_t Gather(const float* normals, float* out) {
    int64_t count = 0;
    while (at_ < kNormals) {
      const int64_t some = std::min(left_, kNormals - at_);
      Copy(normals + at_, some, out + count);
      count += some;
      at_ += some;
      left_ -= some;
      if (left_ > 0) break;
      left_ = segment_.row;
      const int64_t skip = (skip_ + segment_.pitch) % 4;
      at_ += 4 * quads_.in_row() - segment_.row - skip_ + skip;
      skip_ = skip;
    }
    at_ -= kNormals;
    return count;
  }

  // Two vectors at a time: a call of memcpy would take longer.
  SG_INLINE static void Copy(const float* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += kBeyond) {
      Lanes::F32 a;
      Lanes::F32 b;
      memcpy(&a, from + i, sizeof a);
      memcpy(&b, from + i + kBeyond / 2, sizeof b);
      memcpy(to + i, &a, sizeof a);
      memcpy(to + i + kBeyond / 2, &b, sizeof b);
      __asm__ volatile("");  // else gcc makes that call of the loop
    }
  }

  const Segment& segment_;
  int64_t begin_;  // the first element of the next batch
  int64_t left_;   // elements of its row from there on
  int64_t skip_;   // those that its row's first quad has before it
  int64_t at_;     // where its normal is among those of the batch
  const bool are_quads_;
  RowQuads quads_;
  NormalSource source_;
};
