// The loops of chain_product, compiled once per instruction set (random/isa.h):
// all operations are on vectors of chains.

constexpr int64_t kLaneFloats = Lanes::kQuads;

SG_INLINE Lanes::F32 LoadLanes(const float* from) {
  Lanes::F32 x;
  memcpy(&x, from, sizeof x);
  return x;
}

// Some columns of some rows, of which `packed` has [inner, kRows] vectors.
template <int kRows, int kColumns>
SG_INLINE void MultiplyBlock(const ChainProduct& p, const float* packed,
                             int64_t row, int64_t column, int64_t chain) {
  Lanes::F32 sums[kRows][kColumns];
  SG_UNROLL for (int r = 0; r < kRows; ++r) {
    SG_UNROLL for (int j = 0; j < kColumns; ++j) sums[r][j] = Lanes::Set(0);
  }
  const float* b = p.b + column * p.b_column + chain;
  for (int64_t l = 0; l < p.inner; ++l) {
    SG_UNROLL for (int j = 0; j < kColumns; ++j) {
      const Lanes::F32 factor = LoadLanes(b + j * p.b_column);
      SG_UNROLL for (int r = 0; r < kRows; ++r) {
        sums[r][j] =
            Lanes::Fma(LoadLanes(packed + r * kLaneFloats), factor, sums[r][j]);
      }
    }
    b += p.b_row;
    packed += kRows * kLaneFloats;
  }
  SG_UNROLL for (int r = 0; r < kRows; ++r) {
    SG_UNROLL for (int j = 0; j < kColumns; ++j) {
      float* out = p.out + ((row + r) * p.columns + column + j) * p.chains;
      memcpy(out + chain, &sums[r][j], sizeof sums[r][j]);
    }
  }
}

template <int kRows>
void MultiplyRows(const ChainProduct& p, float* packed, int64_t row,
                  int64_t chain) {
  // Lines that are read again and again lie side by side, and stay in the
  // cache.
  for (int64_t l = 0; l < p.inner; ++l) {
    for (int r = 0; r < kRows; ++r) {
      memcpy(packed + (l * kRows + r) * kLaneFloats,
             p.a + (row + r) * p.a_row + l * p.a_column + chain,
             sizeof(Lanes::F32));
    }
  }
  int64_t column = 0;
  for (; column + 2 <= p.columns; column += 2) {
    MultiplyBlock<kRows, 2>(p, packed, row, column, chain);
  }
  if (column < p.columns) {
    MultiplyBlock<kRows, 1>(p, packed, row, column, chain);
  }
}

inline void MultiplyChains(const ChainProduct& p) {
  // Sums that fit into the registers.
  constexpr int kBlock = kLaneFloats == 16 ? 8 : 4;
  std::vector<float> packed(
      static_cast<size_t>(kBlock * p.inner * kLaneFloats));
  for (int64_t chain = 0; chain < p.chains; chain += kLaneFloats) {
    int64_t row = 0;
    for (; row + kBlock <= p.rows; row += kBlock) {
      MultiplyRows<kBlock>(p, packed.data(), row, chain);
    }
    for (; row < p.rows; ++row) {
      MultiplyRows<1>(p, packed.data(), row, chain);
    }
  }
}
