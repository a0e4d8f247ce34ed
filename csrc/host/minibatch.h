// Minibatches as lists of indices.
//
// The i-th index of a step's minibatch owns the quads [i 2^16, (i + 1) 2^16)
// (Note [Counter layout]). Drawing n indices takes O(n), whatever the number of
// data.
#pragma once

#include <cstdint>
#include <vector>

#include "random/counter.h"

namespace torch_sgmcmc {

// A uniform integer in [0, bound), bound >= 1.
uint64_t DrawBelow(uint64_t bound, const NoiseStream& stream, uint64_t element);

// A rank's share of a minibatch: the places rank, rank + num_replicas, ....
struct Share {
  int64_t num_replicas = 1;
  int64_t rank = 0;
};

// Throws std::invalid_argument unless the ranks have equal numbers of data.
void CheckShare(int64_t batch_size, const Share& share);

// The shares of a rank in `count` minibatches of the steps from stream.step on.
// Each is drawn from 0, ..., num_data - 1 uniformly, in uniform order, with or
// without replacement. Throws std::invalid_argument for sizes that do not fit.
std::vector<int64_t> DrawMinibatches(int64_t num_data, int64_t batch_size,
                                     int64_t count, bool replacement,
                                     NoiseStream stream,
                                     const Share& share = {});

}  // namespace torch_sgmcmc
