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
#pragma once

#include <cstdint>

#include "torch_sgmcmc/export.h"

namespace torch_sgmcmc {

/// The seed of a stream, as Python's fold_in: a pure function of a seed and a
/// number, which may be nested. The seeds of n streams are as good as n random
/// 64-bit numbers, so any two of them agree with probability n^2 / 2^65. Throws
/// std::invalid_argument if stream is negative.
TORCH_SGMCMC_API int64_t fold_in(int64_t seed, int64_t stream);

}  // namespace torch_sgmcmc
