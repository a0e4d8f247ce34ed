// The subsample of HMC-ECS: its data, their Taylor expansions, and proposals
// for it. torch_sgmcmc/ecs/subsample.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "host/subsample.h"
#include "libtorch/ecs/taylor.h"

namespace torch_sgmcmc {

// The sizes of a subsample, see csrc/host/subsample.h.
struct SubsampleLayout {
  int64_t num_data = 0;
  int64_t num_cells = 0;
  int64_t num_blocks = 0;
  int64_t batch_size = 0;
  bool poisson = false;
  int64_t seed = 0;
  std::shared_ptr<const SamplingWeights> weights;  // by which data are drawn

  Subsample draws() const;
  bool operator==(const SubsampleLayout&) const = default;
};

// Makes the expansions of the data with some indices.
using Expand = std::function<TaylorTerms(const at::Tensor&)>;

// A subsample's data in the order of its cells. `indices` is the same tensor
// for as long as the data are the same, by which a closure can know that it
// need not gather them again.
struct ExpandedSubsample {
  SubsampleLayout layout;
  std::vector<int64_t> counts;  // minibatches in each cell
  at::Tensor indices;
  TaylorTerms terms;

  // A whole one.
  static std::shared_ptr<const ExpandedSubsample> Draw(
      const SubsampleLayout& layout,
      int64_t step,
      const Expand& expand,
      c10::Device device);
};

// New blocks for the steps [first, first + num_blocks), looked up in advance:
// what is proposed does not depend on the chain, and the expansions of all
// these blocks take hardly longer than those of a single one. The steps are
// always the same ones, that from a multiple of num_blocks on, so that a chain
// that is resumed among them does the same arithmetic.
class BlockProposals {
 public:
  BlockProposals(const SubsampleLayout& layout,
                 int64_t step,
                 const Expand& expand,
                 c10::Device device);

  const SubsampleLayout& layout() const { return layout_; }
  // Whether a step's proposal is here.
  bool covers(int64_t step) const;
  // What a step proposes in place of the current subsample.
  std::shared_ptr<const ExpandedSubsample> apply(
      int64_t step, const ExpandedSubsample& current) const;

 private:
  struct Block {
    int64_t number;
    std::vector<int64_t> counts;
    int64_t begin;  // of its data in indices_
    int64_t end;
  };

  SubsampleLayout layout_;
  int64_t first_;
  std::vector<Block> blocks_;
  at::Tensor indices_;
  TaylorTerms terms_;
};

}  // namespace torch_sgmcmc
