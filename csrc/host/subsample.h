// Which data HMC-ECS estimates the likelihood from, and what it proposes
// instead (algorithm 1 of Dang, Quiroz, Kohn, Tran and Villani 2019).
//
// A subsample is a row of cells. In the perturbed estimator a cell is one
// datum; in the block-Poisson estimator it is one factor of the product, with
// X ~ Poisson(1) minibatches. Data are drawn with replacement, uniformly. The
// cells are parted into blocks of equal size (to rounding), and a
// proposal draws all cells of one block anew, the block chosen uniformly.
//
// A draw is a pure function of the layout and of (seed, step), like every other
// (Note [Counter layout]). It does not depend on the state of the chain, so
// proposals of later steps can be looked at ahead of time. Whole subsamples
// own the elements below 2^32 of each stream, proposals those from 2^32 on.
#pragma once

#include <cstdint>
#include <vector>

#include "core/counter.h"

namespace torch_sgmcmc {

// One Poisson(1) variate, by inversion of a uniform with 52 random bits.
int64_t DrawPoisson(const NoiseStream& stream, uint64_t element);

struct Cells {
  std::vector<int64_t> counts;   // minibatches in each cell
  std::vector<int64_t> indices;  // batch_size for each minibatch, in order
};

struct BlockProposal {
  int64_t block = 0;
  Cells cells;  // of this block
};

class Subsample {
 public:
  // Throws std::invalid_argument unless all sizes are >= 1, no block is empty
  // and a draw fits the stream.
  // Without `poisson` every cell has one minibatch.
  Subsample(int64_t num_data,
            int64_t num_cells,
            int64_t num_blocks,
            int64_t batch_size,
            bool poisson,
            int64_t seed);

  // The first cell of a block; `num_blocks` has the end of the last one.
  int64_t Begin(int64_t block) const;

  Cells Draw(uint64_t step) const;
  BlockProposal Propose(uint64_t step) const;

 private:
  Cells DrawCells(int64_t count, uint64_t step, uint64_t element) const;
  NoiseStream Stream(Purpose purpose, uint64_t step) const;

  int64_t num_data_;
  int64_t num_cells_;
  int64_t num_blocks_;
  int64_t batch_size_;
  bool poisson_;
  uint64_t seed_;
};

}  // namespace torch_sgmcmc
