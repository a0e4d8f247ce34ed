// The loops of launch/rows.h, compiled once per instruction set (random/isa.h).

// Eight elements are two vectors: gcc keeps a vector wider than a register, or
// in a struct, in memory.
constexpr int64_t kFour = kEight / 2;
using Four = double __attribute__((vector_size(kFour * sizeof(double))));

// sum += factor from[...]; no vector is an argument or a result, whose ABI
// would depend on the instruction set.
SG_INLINE void AddFour(const auto& factor, const double* from, Four* sum) {
  Four x;
  memcpy(&x, from, sizeof x);
  *sum += x * factor;
}

// The products of `kRows` rows at once, whose sums are independent.
template <int64_t kRows>
SG_INLINE void ProductsOfRows(const double* rows, int64_t width,
                              const double* vector, const double* last,
                              double* out) {
  const int64_t whole = width / kEight * kEight;
  Four low[kRows] = {};
  Four high[kRows] = {};
  const auto add = [&](int64_t j, const double* factors) {
    Four factor;
    Four next;
    memcpy(&factor, factors, sizeof factor);
    memcpy(&next, factors + kFour, sizeof next);
    SG_UNROLL for (int64_t k = 0; k < kRows; ++k) {
      AddFour(factor, rows + k * width + j, &low[k]);
      AddFour(next, rows + k * width + j + kFour, &high[k]);
    }
  };
  for (int64_t j = 0; j < whole; j += kEight) add(j, vector + j);
  if (whole < width) add(width - kEight, last);
  SG_UNROLL for (int64_t k = 0; k < kRows; ++k) {
    const Four sum = low[k] + high[k];
    out[k] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
  }
}

inline void RowProducts(const double* rows, int64_t count, int64_t width,
                        const double* vector, double* out) {
  if (width < kEight) {
    for (int64_t i = 0; i < count; ++i, rows += width) {
      double sum = 0;
      for (int64_t j = 0; j < width; ++j) sum += rows[j] * vector[j];
      out[i] = sum;
    }
    return;
  }
  // The last eight elements, without the overlap.
  double last[kEight] = {};
  for (int64_t j = width / kEight * kEight; j < width; ++j) {
    last[j - (width - kEight)] = vector[j];
  }
  constexpr int64_t kTogether = 4;
  int64_t i = 0;
  for (; i + kTogether <= count; i += kTogether) {
    ProductsOfRows<kTogether>(rows + i * width, width, vector, last, out + i);
  }
  for (; i < count; ++i) {
    ProductsOfRows<1>(rows + i * width, width, vector, last, out + i);
  }
}

// out[j] += Σ weights[i] rows[i * width + j] for j < columns <= kColumns.
inline void AddRows(const double* rows, int64_t count, int64_t width,
                    int64_t columns, const double* weights, double* out) {
  if (columns < kFour) {
    for (int64_t j = 0; j < columns; ++j) {
      double sum = out[j];
      for (int64_t i = 0; i < count; ++i) {
        sum += weights[i] * rows[i * width + j];
      }
      out[j] = sum;
    }
    return;
  }
  // Overlapping sums are equal.
  constexpr int64_t kMost = kColumns / kFour;
  const int64_t fours = (columns + kFour - 1) / kFour;
  int64_t start[kMost];
  Four sums[kMost];
  for (int64_t e = 0; e < fours; ++e) {
    start[e] = e + 1 < fours ? e * kFour : columns - kFour;
    memcpy(&sums[e], out + start[e], sizeof(Four));
  }
  constexpr int64_t kTogether = 4;
  int64_t i = 0;
  for (; i + kTogether <= count; i += kTogether) {
    const double* row = rows + i * width;
    for (int64_t e = 0; e < fours; ++e) {
      Four sum = sums[e];
      SG_UNROLL for (int64_t k = 0; k < kTogether; ++k) {
        AddFour(weights[i + k], row + k * width + start[e], &sum);
      }
      sums[e] = sum;
    }
  }
  for (; i < count; ++i) {
    for (int64_t e = 0; e < fours; ++e) {
      AddFour(weights[i], rows + i * width + start[e], &sums[e]);
    }
  }
  for (int64_t e = 0; e < fours; ++e) {
    memcpy(out + start[e], &sums[e], sizeof(Four));
  }
}
