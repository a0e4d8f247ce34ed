// The loops of launch/rows.h, compiled once per instruction set (random/isa.h).

using Eight = double __attribute__((vector_size(kEight * sizeof(double))));

SG_INLINE void AddProduct(const double* a, const double* b, Eight* sum) {
  Eight x;
  Eight y;
  memcpy(&x, a, sizeof x);
  memcpy(&y, b, sizeof y);
  *sum += x * y;
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
  const int64_t whole = width / kEight * kEight;
  // The last eight elements, without the overlap.
  double last[kEight] = {};
  for (int64_t j = whole; j < width; ++j) {
    last[j - (width - kEight)] = vector[j];
  }
  for (int64_t i = 0; i < count; ++i, rows += width) {
    Eight sum = {};
    for (int64_t j = 0; j < whole; j += kEight) {
      AddProduct(rows + j, vector + j, &sum);
    }
    if (whole < width) AddProduct(rows + width - kEight, last, &sum);
    out[i] = ((sum[0] + sum[4]) + (sum[2] + sum[6])) +
             ((sum[1] + sum[5]) + (sum[3] + sum[7]));
  }
}

// out[j] += Σ weights[i] rows[i * width + j] for j < columns <= kColumns.
inline void AddRows(const double* rows, int64_t count, int64_t width,
                    int64_t columns, const double* weights, double* out) {
  if (columns < kEight) {
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
  constexpr int64_t kMost = kColumns / kEight;
  const int64_t eights = (columns + kEight - 1) / kEight;
  int64_t start[kMost];
  Eight sums[kMost];
  for (int64_t e = 0; e < eights; ++e) {
    start[e] = e + 1 < eights ? e * kEight : columns - kEight;
    memcpy(&sums[e], out + start[e], sizeof(Eight));
  }
  constexpr int64_t kTogether = 4;
  int64_t i = 0;
  for (; i + kTogether <= count; i += kTogether) {
    const double* row = rows + i * width;
    for (int64_t e = 0; e < eights; ++e) {
      Eight sum = sums[e];
      SG_UNROLL for (int64_t k = 0; k < kTogether; ++k) {
        Eight x;
        memcpy(&x, row + k * width + start[e], sizeof x);
        sum += weights[i + k] * x;
      }
      sums[e] = sum;
    }
  }
  for (; i < count; ++i) {
    for (int64_t e = 0; e < eights; ++e) {
      Eight x;
      memcpy(&x, rows + i * width + start[e], sizeof x);
      sums[e] += weights[i] * x;
    }
  }
  for (int64_t e = 0; e < eights; ++e) {
    memcpy(out + start[e], &sums[e], sizeof(Eight));
  }
}
