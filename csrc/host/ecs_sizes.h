// How HMC-ECS chooses the size of its subsample, from the variances that
// log|L^| was estimated to have at the draws of a warm-up.
#pragma once

#include <cstdint>
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
// d^ being a minibatch's estimate of the sum of all d.
int64_t ChooseNumProducts(const std::vector<double>& variances,
                          int64_t size,
                          double target);

}  // namespace torch_sgmcmc
