// The noise of rows (Note [Rows of shards] in apply/plan.h) on the CPU,
// compiled once per instruction set (see core/isa.h).

// Normals of a segment's elements, in their order. A batch has as many rows as
// it takes, so that narrow ones leave none of its blocks half empty.
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
        index_(IndexOf(s, begin)),
        left_(RowEnd(s, begin) - begin),
        are_quads_(IsOfQuads(s) && begin % 4 == 0),
        source_(stream, NumberNext(&batches_[0])) {
    NumberNext(&batches_[1]);
  }

  // Writes the next normals, kNormals at most, and returns how many. Before
  // each block, calls prefetch(data, the first element that may be of it).
  __attribute__((noinline)) int64_t Next(float* out, Ahead prefetch) {
    Batch& batch = batches_[now_];
    const Batch& then = batches_[1 - now_];
    alignas(64) float apart[kNormals + kBeyond];
    // Normals of whole quads follow each other as the elements do.
    float* const normals = are_quads_ ? out : apart;
    for (int64_t i = 0; i < kBlocks; ++i) {
      prefetch(segment_.data, begin_ + i * kNoiseBlock);
      const uint64_t* quads = batch.quads + i * kQuadBlock;
      source_.Next(normals + i * kNoiseBlock,
                   quads,
                   i + 1 < kBlocks ? quads + kQuadBlock : then.quads);
    }
    const int64_t count = are_quads_ ? kNormals : Gather(batch, normals, out);
    // Long before it is read: what has only just been stored must be waited
    // for.
    NumberNext(&batch);
    now_ = 1 - now_;
    begin_ += count;
    return count;
  }

 private:
  static constexpr int64_t kNormals = kBlocks * kNoiseBlock;
  static constexpr int64_t kBatchQuads = kBlocks * kQuadBlock;
  static constexpr int64_t kTogether = Lanes::kQuads / Lanes::kStates;

  // The normals [begin, begin + count) of a batch, which are of one row.
  struct Part {
    int32_t begin;
    int32_t count;
  };

  struct Batch {
    alignas(64) uint64_t quads[kBatchQuads + kTogether];
    Part parts[kBatchQuads];
    int64_t num_parts;
  };

  // Finds the quads of the next elements, which it returns, and their parts.
  const uint64_t* NumberNext(Batch* batch) {
    return are_quads_ ? Number<true>(batch) : Number<false>(batch);
  }

  template <bool kAreQuads>
  SG_INLINE const uint64_t* Number(Batch* batch) {
    uint64_t index = index_;
    int64_t left = left_;
    int64_t num_parts = 0;
    for (int64_t begin = 0; begin < kNormals;) {
      uint64_t quad = index / 4;
      uint64_t* quads = batch->quads + begin / 4;
      if (!kAreQuads) begin += static_cast<int64_t>(index % 4);
      const int64_t count = std::min(left, kNormals - begin);
      if (!kAreQuads) {
        batch->parts[num_parts++] = {static_cast<int32_t>(begin),
                                     static_cast<int32_t>(count)};
      }
      begin = (begin + count + (kAreQuads ? 0 : 3)) / 4 * 4;
      for (const uint64_t* end = batch->quads + begin / 4; quads < end;
           quads += kTogether) {
        const Lanes::U64 some = Lanes::From(quad);
        memcpy(quads, &some, sizeof some);
        quad += kTogether;
      }
      index += static_cast<uint64_t>(count);
      left -= count;
      if (left == 0) {
        index += static_cast<uint64_t>(segment_.pitch - segment_.row);
        left = segment_.row;
      }
    }
    batch->num_parts = num_parts;
    index_ = index;
    left_ = left;
    return batch->quads;
  }

  // Puts the parts of a batch behind each other, and says how many there are.
  SG_INLINE static int64_t Gather(const Batch& batch,
                                  const float* normals,
                                  float* out) {
    int64_t count = 0;
    for (int64_t i = 0; i < batch.num_parts; ++i) {
      const Part part = batch.parts[i];
      Copy(normals + part.begin, part.count, out + count);
      count += part.count;
    }
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
  int64_t begin_;   // the first element of the next batch
  uint64_t index_;  // of the first element that has no number yet
  int64_t left_;    // elements of its row from there on
  const bool are_quads_;
  int now_ = 0;
  Batch batches_[2] = {};  // the one that is being made, and the next
  NormalSource source_;
};
