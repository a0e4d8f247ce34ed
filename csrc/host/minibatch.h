// Minibatches as lists of indices.
//
// The minibatch of a step is a pure function of (seed, step, purpose) and of
// the sizes, like every other draw (Note [Counter layout]): the i-th index owns
// the quads [i 2^16, (i + 1) 2^16). Time and memory do not depend on the number
// of data: drawing n of them takes O(n).
#pragma once

#include <cstdint>
#include <vector>

#include "random/counter.h"

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
std::vector<int64_t> DrawMinibatches(int64_t num_data, int64_t batch_size,
                                     int64_t count, bool replacement,
                                     NoiseStream stream,
                                     const Share& share = {});

}  // namespace torch_sgmcmc
