// Minibatches as lists of indices: uniform ones and stratified ones.
//
// The minibatch of a step is a pure function of (seed, step, purpose) and of
// the sizes, like every other draw (Note [Counter layout]): the i-th index owns
// the quads [i 2^16, (i + 1) 2^16). Time and memory do not depend on the number
// of data: drawing n of them takes O(n).
#pragma once

#include <cstdint>
#include <vector>

#include "core/counter.h"

namespace torch_sgmcmc {

// A uniform integer in [0, bound), bound >= 1, without any bias.
uint64_t DrawBelow(uint64_t bound, const NoiseStream& stream, uint64_t element);

// The data-parallel ranks that share each minibatch, and one of them: it has
// the places rank, rank + num_replicas, ..., so that all together have it.
struct Share {
  int64_t num_replicas = 1;
  int64_t rank = 0;
};

// Throws std::invalid_argument unless the ranks have equal numbers of data.
void CheckShare(int64_t batch_size, const Share& share);

// `count` minibatches of the steps stream.step, stream.step + 1, ..., one after
// the other. Each is drawn from 0, ..., num_data - 1 uniformly, without
// replacement (in uniform order, so that any part of it is a uniform minibatch
// too) or with replacement. Of each there is the share of one rank. Throws
// std::invalid_argument for sizes that do not fit.
std::vector<int64_t> DrawMinibatches(int64_t num_data,
                                     int64_t batch_size,
                                     int64_t count,
                                     bool replacement,
                                     NoiseStream stream,
                                     const Share& share = {});

// The same for data sorted by stratum, the k-th stratum being [ends[k - 1],
// ends[k]). A minibatch of n out of N takes n N_k / N data from a stratum of
// N_k, rounded up or down at random such that this is their mean number and n
// their sum; within a stratum uniformly without replacement. Every datum is
// then in the minibatch with probability n / N, so that the plain mean over it
// is unbiased for strata of any sizes. Data come in the order of their strata.
std::vector<int64_t> DrawStratifiedMinibatches(const std::vector<int64_t>& ends,
                                               int64_t batch_size,
                                               int64_t count,
                                               NoiseStream stream,
                                               const Share& share = {});

}  // namespace torch_sgmcmc
