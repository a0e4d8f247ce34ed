// The running variance of the gradients that SGHMC takes for
// noise_estimate="online": a plain mean over the first 1 / kVarianceDecay
// gradients, and exponentially forgetting from then on.
#pragma once

#include <cstdint>

namespace torch_sgmcmc {

// The weight of a gradient, once there have been many.
constexpr double kVarianceDecay = 1e-3;

// So many have to have been seen for the largest coordinate's variance to mean
// something; it is not used before.
constexpr int64_t kMinGradients = 100;

}  // namespace torch_sgmcmc
