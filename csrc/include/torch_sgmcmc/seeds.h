// Seeds for several chains or processes, or for the samplers of a model's
// parts:
//
//   SGHMC encoder(net->encoder->parameters(),
//                 SGHMCOptions(0.1).num_data(n).seed(fold_in(seed, 0)));
//   SGHMC decoder(net->decoder->parameters(),
//                 SGHMCOptions(0.1).num_data(n).seed(fold_in(seed, 1)));
//
// Noise is a function of (seed, step, purpose, element), and every sampler
// counts its elements from 0: two samplers with one seed draw the same noise,
// without a warning in C++. Replicas of one chain need the same seed.
//
// Indices of independent minibatches:
//
//   for (int64_t step = 0; step < steps; ++step) {
//     const auto index = torch::tensor(
//         torch_sgmcmc::draw_minibatch(num_data, 500, seed, step));
//     const torch::Tensor x = data.index_select(0, index);
//     ...
//   }
//
// These are the minibatches of Python's IndependentBatchSampler with the same
// seed, which may be the sampler's. Time and memory are O(batch_size). Of
// num_replicas = D data-parallel ranks, rank r has the places r, r + D, ....
#pragma once

#include <cstdint>
#include <vector>

#include "torch_sgmcmc/export.h"

namespace torch_sgmcmc {

/// The seed of a stream, as Python's fold_in, a pure function that may be
/// nested. Among n streams two seeds agree with probability n^2 / 2^65. Throws
/// std::invalid_argument if stream is negative.
TORCH_SGMCMC_API int64_t fold_in(int64_t seed, int64_t stream);

/// Draws `batch_size` of the indices 0, ..., num_data - 1 uniformly, in uniform
/// order; returns the share of `rank`. batch_size is a multiple of
/// num_replicas. Throws std::invalid_argument if a size or rank does not fit,
/// or step is not in [0, 2^48).
TORCH_SGMCMC_API std::vector<int64_t> draw_minibatch(
    int64_t num_data, int64_t batch_size, int64_t seed, int64_t step,
    bool replacement = false, int64_t num_replicas = 1, int64_t rank = 0);

}  // namespace torch_sgmcmc
