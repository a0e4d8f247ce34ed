// Products of vectors with many rows of a float64 matrix, in a fixed order.
//
// HMC-ECS needs a number from each row (the expansions of many data), and a
// weighted sum of all rows (their gradient). Eight running sums take a row's
// elements and are added in a tree; the last eight elements may overlap the
// eight before. Threads share rows in the former and columns in the latter, so
// that results depend neither on their number nor on the instruction set.
#pragma once

#include <string.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "random/isa.h"
#include "random/macros.h"

namespace torch_sgmcmc {

constexpr int64_t kEight = 8;
// Columns with running sums at a time.
constexpr int64_t kColumns = 256;
// Fewest products for a second thread.
constexpr int64_t kRowGrain = 65536;

}  // namespace torch_sgmcmc

#define SG_EACH_ISA "launch/rows_loop.inl"
#include "random/each_isa.inl"

namespace torch_sgmcmc {

// out[i] = rows[i] · vector, for `count` rows of `width` elements.
inline void RowProducts(const double* rows, int64_t count, int64_t width,
                        const double* vector, double* out,
                        Isa isa = ActiveIsa()) {
  if (width == 0) {
    std::fill_n(out, count, 0.0);
    return;
  }
  const int64_t grain = std::max<int64_t>(1, kRowGrain / width);
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    SG_CALL_ON(isa, RowProducts(rows + begin * width, end - begin, width,
                                vector, out + begin));
  });
}

// out += Σ weights[i] rows[i].
inline void AddRows(const double* rows, int64_t count, int64_t width,
                    const double* weights, double* out, Isa isa = ActiveIsa()) {
  const int64_t tiles = (width + kColumns - 1) / kColumns;
  const int64_t grain = std::max<int64_t>(
      1, kRowGrain / (kColumns * std::max<int64_t>(1, count)));
  torch::stable::parallel_for(0, tiles, grain, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin * kColumns;
         column < std::min(width, end * kColumns); column += kColumns) {
      const int64_t columns = std::min(kColumns, width - column);
      SG_CALL_ON(isa, AddRows(rows + column, count, width, columns, weights,
                              out + column));
    }
  });
}

// a · b, as one row.
inline double Product(const double* a, const double* b, int64_t width) {
  double result = 0;
  SG_CALL_ON(ActiveIsa(), RowProducts(a, 1, width, b, &result));
  return result;
}

}  // namespace torch_sgmcmc
