// The two estimators of HMC-ECS as functions of the differences d between the
// log-likelihoods of a subsample's data and their expansions (Dang, Quiroz,
// Kohn, Tran and Villani 2019). Both estimate exp(Σ d) over all data.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace torch_sgmcmc {

// An estimator's settings; num_factors is 0 for the perturbed estimator, whose
// only batch is the subsample.
struct ECSEstimator {
  double num_data = 1;
  int64_t batch_size = 1;   // m, of the block-Poisson estimator
  int64_t num_factors = 0;  // λ
  double lower_bound = 0;   // a
};

// log|estimate|, its estimated variance, the estimate of Σ d, the sign, and the
// lowest estimate of Σ d by a batch.
struct ECSEstimate {
  double log = 0;
  double variance = 0;
  double mean = 0;
  double sign = 1;
  double lowest = 0;
};

namespace detail {

// a · b, with the bits of Product in csrc/launch/rows.h: eight running sums.
inline double ProductOf(const double* a, const double* b, int64_t count) {
  constexpr int64_t kEights = 8;
  if (count < kEights) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
  }
  double sum[kEights] = {};
  const int64_t whole = count / kEights * kEights;
  for (int64_t i = 0; i < whole; i += kEights) {
    for (int64_t k = 0; k < kEights; ++k) sum[k] += a[i + k] * b[i + k];
  }
  if (whole < count) {
    const int64_t last = count - kEights;
    for (int64_t k = 0; k < kEights; ++k) {
      sum[k] += a[last + k] * (last + k < whole ? 0.0 : b[last + k]);
    }
  }
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) +
         ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

}  // namespace detail

// Σ x, in pieces of 1024.
inline double ECSSum(const double* x, int64_t count) {
  struct Ones {
    constexpr Ones() { std::fill_n(values, 1024, 1.0); }
    double values[1024] = {};
  };
  static constexpr Ones kOnes;
  double sum = 0;
  for (int64_t i = 0; i < count; i += 1024) {
    const int64_t size = std::min<int64_t>(1024, count - i);
    sum += detail::ProductOf(x + i, kOnes.values, size);
  }
  return sum;
}

// exp(d̂ - σ̂² / 2): eq. 4.1, 4.3 and 4.5. Writes the derivatives by d.
inline ECSEstimate ECSPerturbed(const ECSEstimator& e,
                                const double* differences, int64_t count,
                                double* weights) {
  const auto size = static_cast<double>(count);
  const double scale = e.num_data / size;
  const double sum = ECSSum(differences, count);
  const double mean = sum / size;
  for (int64_t i = 0; i < count; ++i) weights[i] = differences[i] - mean;
  const double square = scale * scale;
  ECSEstimate result;
  result.mean = scale * sum;
  result.variance = square * detail::ProductOf(weights, weights, count);
  result.lowest = result.mean;
  result.log = result.mean - result.variance / 2;
  // d(σ̂² / 2) / d dᵢ is scale² (dᵢ - d̄): the mean's part adds up to 0.
  for (int64_t i = 0; i < count; ++i) weights[i] = scale - square * weights[i];
  return result;
}

// The block-Poisson estimator, eq. 5.1, of all minibatches one after the other.
inline ECSEstimate ECSBlockPoisson(const ECSEstimator& e,
                                   const double* differences, int64_t count,
                                   double* weights) {
  const double scale = e.num_data / static_cast<double>(e.batch_size);
  const auto factors = static_cast<double>(e.num_factors);
  const int64_t batches = count / e.batch_size;
  ECSEstimate result;
  double sum = 0;
  for (int64_t b = 0; b < batches; ++b) {
    const int64_t begin = b * e.batch_size;
    const double estimate = scale * ECSSum(differences + begin, e.batch_size);
    const double excess = estimate - e.lower_bound;
    const double log = std::log(std::abs(excess / factors));
    sum += estimate;
    result.lowest = b == 0 ? estimate : std::min(result.lowest, estimate);
    result.log += log;
    // log|L̂| is a sum over Poisson(λ) minibatches: its variance is λ E[log²].
    result.variance += log * log;
    if (excess < 0) result.sign = -result.sign;
    for (int64_t i = 0; i < e.batch_size; ++i) {
      weights[begin + i] = scale / excess;
    }
  }
  result.log += e.lower_bound + factors;
  if (batches > 0) result.mean = sum / static_cast<double>(batches);
  return result;
}

// `count` is a multiple of the batch size, and not 0 without factors.
inline ECSEstimate EstimateLikelihood(const ECSEstimator& e,
                                      const double* differences, int64_t count,
                                      double* weights) {
  return e.num_factors == 0 ? ECSPerturbed(e, differences, count, weights)
                            : ECSBlockPoisson(e, differences, count, weights);
}

}  // namespace torch_sgmcmc
