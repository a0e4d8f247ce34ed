#include "libtorch/ecs/subsample.h"

#include <ATen/ATen.h>

#include <numeric>

namespace torch_sgmcmc {
namespace {

at::Tensor IndicesOn(c10::Device device, const std::vector<int64_t>& indices) {
  return at::tensor(indices, at::TensorOptions(at::kLong)).to(device);
}

// The number of data in the cells [begin, end).
int64_t SizeOfCells(const SubsampleLayout& layout,
                    const std::vector<int64_t>& counts,
                    int64_t begin,
                    int64_t end) {
  return layout.batch_size * std::accumulate(counts.begin() + begin,
                                             counts.begin() + end,
                                             int64_t{0});
}

}  // namespace

Subsample SubsampleLayout::draws() const {
  return {num_data, num_cells, num_blocks, batch_size, poisson, seed, weights};
}

std::shared_ptr<const ExpandedSubsample> ExpandedSubsample::Draw(
    const SubsampleLayout& layout,
    int64_t step,
    const Expand& expand,
    c10::Device device) {
  Cells cells = layout.draws().Draw(static_cast<uint64_t>(step));
  const at::Tensor indices = IndicesOn(device, cells.indices);
  return std::make_shared<const ExpandedSubsample>(ExpandedSubsample{
      layout, std::move(cells.counts), indices, expand(indices)});
}

BlockProposals::BlockProposals(const SubsampleLayout& layout,
                               int64_t step,
                               const Expand& expand,
                               c10::Device device)
    : layout_(layout), first_(step - step % layout.num_blocks) {
  const Subsample draws = layout.draws();
  std::vector<int64_t> all;
  for (int64_t i = 0; i < layout.num_blocks; ++i) {
    BlockProposal drawn = draws.Propose(static_cast<uint64_t>(first_ + i));
    const auto begin = static_cast<int64_t>(all.size());
    all.insert(
        all.end(), drawn.cells.indices.begin(), drawn.cells.indices.end());
    blocks_.push_back({drawn.block,
                       std::move(drawn.cells.counts),
                       begin,
                       static_cast<int64_t>(all.size())});
  }
  indices_ = IndicesOn(device, all);
  terms_ = expand(indices_);
}

bool BlockProposals::covers(int64_t step) const {
  return first_ <= step && step < first_ + layout_.num_blocks;
}

std::shared_ptr<const ExpandedSubsample> BlockProposals::apply(
    int64_t step, const ExpandedSubsample& current) const {
  const Block& block = blocks_[static_cast<size_t>(step - first_)];
  const Subsample draws = layout_.draws();
  const int64_t low = draws.Begin(block.number);
  const int64_t high = draws.Begin(block.number + 1);
  const int64_t begin = SizeOfCells(layout_, current.counts, 0, low);
  const int64_t end = begin + SizeOfCells(layout_, current.counts, low, high);
  const int64_t size = current.indices.numel();
  std::vector<int64_t> counts = current.counts;
  std::copy(block.counts.begin(), block.counts.end(), counts.begin() + low);
  const at::Tensor indices = at::cat({current.indices.slice(0, 0, begin),
                                      indices_.slice(0, block.begin, block.end),
                                      current.indices.slice(0, end, size)});
  // NOLINTNEXTLINE(readability-suspicious-call-argument): from the block's end.
  const TaylorTerms rest = current.terms.part(end, size);
  return std::make_shared<const ExpandedSubsample>(
      ExpandedSubsample{layout_,
                        std::move(counts),
                        indices,
                        TaylorTerms::Join({current.terms.part(0, begin),
                                           terms_.part(block.begin, block.end),
                                           rest})});
}

}  // namespace torch_sgmcmc
