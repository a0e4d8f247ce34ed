#include "host/ecs_sizes.h"

#include <algorithm>
#include <cmath>

namespace torch_sgmcmc {
namespace {

constexpr int64_t kLeastSubsample = 30;
// Beyond any subsample that fits a stream of noise (csrc/host/subsample.cpp).
constexpr double kLargestSize = 1e15;

int64_t Ceiling(double size) {
  return static_cast<int64_t>(std::ceil(std::min(size, kLargestSize)));
}

}  // namespace

double MeanOf(const std::vector<double>& numbers) {
  double sum = 0;
  for (const double number : numbers) sum += number;
  return sum / static_cast<double>(numbers.size());
}

int64_t ChooseSubsampleSize(const std::vector<double>& variances,
                            int64_t size,
                            double target,
                            int64_t num_data) {
  const double wanted = static_cast<double>(size) * MeanOf(variances) / target;
  const int64_t enough =
      std::max(Ceiling(wanted), std::min(kLeastSubsample, size));
  return std::min(enough, std::max(num_data, int64_t{2}));
}

int64_t ChooseNumProducts(const std::vector<double>& variances,
                          int64_t size,
                          double target) {
  const double spread = MeanOf(variances) * static_cast<double>(size);
  int64_t result = std::max(int64_t{1}, Ceiling(spread / target));
  while (true) {
    // The signs are those of a product of Poisson(λ) factors, each negative
    // with probability p, so that E s = exp(-2 λ p); the effective draws are
    // (E s)^2.
    const auto products = static_cast<double>(result);
    const double negative =
        spread > 0 ? 0.5 * std::erfc(products / std::sqrt(2 * spread)) : 0;
    if (std::exp(-4 * products * negative) >= 0.98) return result;
    result += 1 + result / 10;
  }
}

int64_t ChooseNumProductsByLowest(const std::vector<double>& variances,
                                  int64_t size,
                                  const std::vector<double>& means,
                                  const std::vector<double>& lowest) {
  const double fall =
      MeanOf(means) - *std::min_element(lowest.begin(), lowest.end());
  const int64_t positive = std::max(int64_t{1}, Ceiling(3 * fall));
  return std::min(positive, ChooseNumProducts(variances, size, 1));
}

}  // namespace torch_sgmcmc
