// Seeds for samplers that are to share no noise: several chains or processes,
// or the parts of a model with a sampler each.
//
//   SGHMC encoder(net->encoder->parameters(),
//                 SGHMCOptions(0.1).num_data(n).seed(fold_in(seed, 0)));
//   SGHMC decoder(net->decoder->parameters(),
//                 SGHMCOptions(0.1).num_data(n).seed(fold_in(seed, 1)));
//
// Noise is a function of (seed, step, purpose, element), and the elements of
// every sampler are counted from 0: two samplers with one seed draw the same
// noise, and nothing warns of it in C++. Replicas of one chain in several
// processes, on the other hand, need the same seed in each, which a program has
// to give: samplers do not communicate.
//
// Indices of minibatches that are drawn independently of each other.
//
//   for (int64_t step = 0; step < steps; ++step) {
//     const auto index = torch::tensor(
//         torch_sgmcmc::draw_minibatch(num_data, 500, seed, step));
//     const torch::Tensor x = data.index_select(0, index);
//     ...
//   }
//
// They are the minibatches of Python's IndependentBatchSampler with the same
// seed: pure functions of their arguments, of which each step is another draw.
// A sampler's seed may be used, too: they share no random number. Time and
// memory are O(batch_size).
//
// Data-parallel ranks share a minibatch: of num_replicas = D, rank r has the
// data at its places r, r + D, ..., so that all together have it.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_sgmcmc/export.h"

namespace torch_sgmcmc {

/// The seed of a stream, as Python's fold_in: a pure function of a seed and a
/// number, which may be nested. The seeds of n streams are as good as n random
/// 64-bit numbers, so any two of them agree with probability n^2 / 2^65. Throws
/// std::invalid_argument if stream is negative.
TORCH_SGMCMC_API int64_t fold_in(int64_t seed, int64_t stream);

/// `batch_size` of the indices 0, ..., num_data - 1, uniformly, in uniform
/// order; without replacement unless asked for. Of num_replicas ranks that
/// share them, which batch_size is a multiple of, the share of rank in [0,
/// num_replicas). Throws std::invalid_argument if a size or rank does not fit
/// or step is not in [0, 2^48).
TORCH_SGMCMC_API std::vector<int64_t> draw_minibatch(
    int64_t num_data, int64_t batch_size, int64_t seed, int64_t step,
    bool replacement = false, int64_t num_replicas = 1, int64_t rank = 0);

}  // namespace torch_sgmcmc
