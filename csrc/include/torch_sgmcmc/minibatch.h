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
// A seed may be that of a sampler too; they share no random number. Time and
// memory are O(batch_size).
//
// Data-parallel ranks share a minibatch: of num_replicas = D, rank r has the
// data at its places r, r + D, ..., so that all together have it.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_sgmcmc/export.h"

namespace torch_sgmcmc {

/// `batch_size` of the indices 0, ..., num_data - 1, uniformly, in uniform
/// order; without replacement unless asked for. Of num_replicas ranks that
/// share them, which batch_size is a multiple of, those of one in [0,
/// num_replicas). Throws std::invalid_argument if a size or rank does not fit
/// or step is not in [0, 2^48).
TORCH_SGMCMC_API std::vector<int64_t> draw_minibatch(int64_t num_data,
                                                     int64_t batch_size,
                                                     int64_t seed,
                                                     int64_t step,
                                                     bool replacement = false,
                                                     int64_t num_replicas = 1,
                                                     int64_t rank = 0);

}  // namespace torch_sgmcmc
