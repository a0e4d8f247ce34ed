// The loops of chain_product, compiled once per instruction set (random/isa.h).
// A vector has some chains of one or several columns, so that no lane is empty
// whatever the number of chains: 10 are 8, of two columns of AVX-512, and 2, of
// eight columns.

constexpr int kLaneFloats = Lanes::kQuads;
// Sums that fit into the registers: of so many rows, and vectors of columns.
constexpr int kRowBlock = 4;
constexpr int kVectors = kLaneFloats == 16 ? 4 : 2;

template <int kChains>
void MultiplyGroup(const ChainProduct& p, int64_t chain) {
  constexpr size_t kBytes = kChains * sizeof(float);
  constexpr int64_t kColumns = kVectors * kLaneFloats / kChains;
  constexpr int64_t kStep = int64_t{kVectors} * kLaneFloats;
  const int64_t blocks = (p.columns + kColumns - 1) / kColumns;
  // What is read again and again lies side by side, and stays in the cache: a's
  // rows do so, unless a is transposed.
  static thread_local std::vector<float> packed;
  packed.resize(
      static_cast<size_t>(p.inner * (blocks * kStep + kRowBlock * kChains)));
  float* const a = packed.data();
  float* const b = a + p.inner * kRowBlock * kChains;
  for (int64_t l = 0; l < p.inner; ++l) {
    const float* from = p.b + l * p.b_row + chain;
    for (int64_t j = 0; j < p.columns; ++j) {
      memcpy(b + (j / kColumns * p.inner + l) * kStep + j % kColumns * kChains,
             from + j * p.b_column, kBytes);
    }
  }
  const bool is_packed = p.a_column > p.a_row;
  const int64_t a_step = is_packed ? kRowBlock * kChains : p.a_column;
  for (int64_t row = 0; row < p.rows; row += kRowBlock) {
    const int64_t rows = std::min<int64_t>(kRowBlock, p.rows - row);
    const float* of_row[kRowBlock];
    for (int64_t r = 0; r < kRowBlock; ++r) {
      of_row[r] = p.a + (row + std::min(r, rows - 1)) * p.a_row + chain;
      for (int64_t l = 0; is_packed && l < p.inner; ++l) {
        memcpy(a + (l * kRowBlock + r) * kChains, of_row[r] + l * p.a_column,
               kBytes);
      }
      if (is_packed) of_row[r] = a + r * kChains;
    }
    for (int64_t block = 0; block < blocks; ++block) {
      Lanes::F32 sums[kRowBlock][kVectors];
      SG_UNROLL for (auto& of_a_row : sums) {
        SG_UNROLL for (Lanes::F32& sum : of_a_row) sum = Lanes::Set(0);
      }
      const float* own = b + block * p.inner * kStep;
      for (int64_t l = 0; l < p.inner; ++l) {
        Lanes::F32 factors[kVectors];
        SG_UNROLL for (int v = 0; v < kVectors; ++v) {
          memcpy(&factors[v], own + l * kStep + v * kLaneFloats,
                 sizeof factors[v]);
        }
        SG_UNROLL for (int r = 0; r < kRowBlock; ++r) {
          const Lanes::F32 x = Lanes::Repeat<kChains>(of_row[r] + l * a_step);
          SG_UNROLL for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = Lanes::Fma(x, factors[v], sums[r][v]);
          }
        }
      }
      const int64_t first = block * kColumns;
      const int64_t columns = std::min(kColumns, p.columns - first);
      Lanes::F32 found[kRowBlock][kVectors];
      SG_UNROLL for (int r = 0; r < kRowBlock; ++r) {
        SG_UNROLL for (int v = 0; v < kVectors; ++v) found[r][v] = sums[r][v];
      }
      for (int64_t r = 0; r < rows; ++r) {
        float* out = p.out + ((row + r) * p.columns + first) * p.chains + chain;
        const auto* of_a_row = reinterpret_cast<const float*>(found[r]);
        for (int64_t j = 0; j < columns; ++j) {
          memcpy(out + j * p.chains, of_a_row + j * kChains, kBytes);
        }
      }
    }
  }
}

template <int kChains>
void MultiplyFrom(const ChainProduct& p, int64_t chain) {
  for (; chain + kChains <= p.chains; chain += kChains) {
    MultiplyGroup<kChains>(p, chain);
  }
  if constexpr (kChains > 1) MultiplyFrom<kChains / 2>(p, chain);
}

inline void MultiplyChains(const ChainProduct& p) {
  MultiplyFrom<std::min(kLaneFloats, 8)>(p, 0);
}
