// The two estimators of HMC-ECS as functions of the differences d between the
// log-likelihoods of a subsample's data and their expansions (Dang, Quiroz,
// Kohn, Tran and Villani 2019). Both estimate exp(Σ d) over all data.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "apply/rows.h"

namespace torch_sgmcmc {

// What a likelihood is estimated with; num_products is 0 for the perturbed
// estimator, whose only batch is the subsample.
struct ECSEstimator {
  double num_data;
  int64_t batch_size;
  int64_t num_products;
  double lower_bound;
};

// The estimate's logarithm (of its absolute value), the estimated variance of
// that, the estimate of Σ d, and the sign: an operator's result, in this order.
struct ECSEstimate {
  double log = 0;
  double variance = 0;
  double mean = 0;
  double sign = 1;
};
constexpr int64_t kECSEstimate = 4;

inline double ECSSum(const double* x, int64_t count) {
  static const std::vector<double> ones(1024, 1.0);
  double sum = 0;
  for (int64_t i = 0; i < count; i += 1024) {
    sum += Product(x + i, ones.data(), std::min<int64_t>(1024, count - i));
  }
  return sum;
}

// exp(d̂ - σ̂² / 2): eq. 4.1, 4.3 and 4.5. Writes the derivatives by d.
inline ECSEstimate ECSPerturbed(const ECSEstimator& e,
                                const double* differences,
                                int64_t count,
                                double* weights) {
  const auto size = static_cast<double>(count);
  const double scale = e.num_data / size;
  const double sum = ECSSum(differences, count);
  const double mean = sum / size;
  for (int64_t i = 0; i < count; ++i) weights[i] = differences[i] - mean;
  const double square = scale * scale;
  ECSEstimate result;
  result.mean = scale * sum;
  result.variance = square * Product(weights, weights, count);
  result.log = result.mean - result.variance / 2;
  // d(σ̂² / 2) / d dᵢ is scale² (dᵢ - d̄): the mean's part adds up to 0.
  for (int64_t i = 0; i < count; ++i) weights[i] = scale - square * weights[i];
  return result;
}

// The block-Poisson estimator, eq. 5.1, of all minibatches one after the other.
inline ECSEstimate ECSBlockPoisson(const ECSEstimator& e,
                                   const double* differences,
                                   int64_t count,
                                   double* weights) {
  const double scale = e.num_data / static_cast<double>(e.batch_size);
  const auto products = static_cast<double>(e.num_products);
  const int64_t batches = count / e.batch_size;
  ECSEstimate result;
  double sum = 0;
  for (int64_t b = 0; b < batches; ++b) {
    const int64_t begin = b * e.batch_size;
    const double estimate = scale * ECSSum(differences + begin, e.batch_size);
    const double excess = estimate - e.lower_bound;
    const double log = std::log(std::abs(excess / products));
    sum += estimate;
    result.log += log;
    // log|L̂| is a sum over Poisson(λ) minibatches: its variance is λ E[log²].
    result.variance += log * log;
    if (excess < 0) result.sign = -result.sign;
    for (int64_t i = 0; i < e.batch_size; ++i) {
      weights[begin + i] = scale / excess;
    }
  }
  result.log += e.lower_bound + products;
  if (batches > 0) result.mean = sum / static_cast<double>(batches);
  return result;
}

}  // namespace torch_sgmcmc
