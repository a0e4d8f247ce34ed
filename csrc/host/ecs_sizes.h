// How HMC-ECS chooses the size of its subsample, from what estimates at the
// draws of a warm-up had.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace torch_sgmcmc {

// The mean; there is at least one number.
double MeanOf(const std::vector<double>& numbers);

// The m for which the perturbed estimator's log has about the target's
// variance, which is proportional to 1 / m, from draws with `size`: not below
// 30 (or `size` if that is less), since the variance is then poorly estimated
// and the estimate not nearly normal; and not above max(num_data, 2).
int64_t ChooseSubsampleSize(const std::vector<double>& variances,
                            int64_t size,
                            double target,
                            int64_t num_data);

// The least λ for which the block-Poisson estimator's log has about the
// target's variance, and negative signs cost less than 2 % of the effective
// draws, from draws with `size` factors. The log has the variance Var(d^) / λ,
// d^ being a minibatch's estimate of the sum of all d. (While a is far from the
// mean of d^ less λ it is more, and λ too large; by how much is chance, so no
// rule takes it off.)
int64_t ChooseNumProducts(const std::vector<double>& variances,
                          int64_t size,
                          double target);

// The target's variance that asks for few factors, to save computing time.
constexpr double kLeastTime = std::numeric_limits<double>::infinity();

// Their number: three times as much as the lowest of all d^ was below their
// mean, or that of a variance of 1 if that is less. u in blocks bears a larger
// variance of log|L^| than 1; but where factors are negative the chain sticks
// and leaves, sooner than signs cost effective draws
// (docs/samplers/hmcecs.md).
int64_t ChooseNumProductsByLowest(const std::vector<double>& variances,
                                  int64_t size,
                                  const std::vector<double>& means,
                                  const std::vector<double>& lowest);

}  // namespace torch_sgmcmc
