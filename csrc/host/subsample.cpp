#include "host/subsample.h"

#include <stdexcept>
#include <string>

#include "host/minibatch.h"
#include "host/uniforms.h"

namespace torch_sgmcmc {
namespace {

constexpr uint64_t kProposals = uint64_t{1} << 32;
// A Poisson(1) variate of 52 random bits is below this, so that the elements of
// one draw stay below 2^32.
constexpr int64_t kMaxPoisson = 32;

void CheckSize(const std::string& name, int64_t value, int64_t high) {
  if (value >= 1 && value <= high) return;
  throw std::invalid_argument("Invalid " + name + ": " + std::to_string(value) +
                              " (must be in [1, " + std::to_string(high) +
                              "])");
}

}  // namespace

int64_t DrawPoisson(const NoiseStream& stream, uint64_t element) {
  const double u = Uniforms(stream, element << 16).first;
  double term = 0.36787944117144233;  // exp(-1)
  double sum = term;
  int64_t k = 0;
  while (u >= sum && k < kMaxPoisson) {
    ++k;
    term /= static_cast<double>(k);
    sum += term;
  }
  return k;
}

Subsample::Subsample(int64_t num_data,
                     int64_t num_cells,
                     int64_t num_blocks,
                     int64_t batch_size,
                     bool poisson,
                     int64_t seed)
    : num_data_(num_data),
      num_cells_(num_cells),
      num_blocks_(num_blocks),
      batch_size_(batch_size),
      poisson_(poisson),
      seed_(static_cast<uint64_t>(seed)) {
  constexpr int64_t kMaxElements = int64_t{1} << 26;
  CheckSize("num_data", num_data, int64_t{1} << 48);
  CheckSize("batch_size", batch_size, kMaxElements);
  CheckSize("num_cells", num_cells, kMaxElements / batch_size);
  CheckSize("num_blocks", num_blocks, num_cells);
}

int64_t Subsample::Begin(int64_t block) const {
  return block * num_cells_ / num_blocks_;
}

Cells Subsample::Draw(uint64_t step) const {
  return DrawCells(num_cells_, step, /*element=*/0);
}

BlockProposal Subsample::Propose(uint64_t step) const {
  const auto block =
      static_cast<int64_t>(DrawBelow(static_cast<uint64_t>(num_blocks_),
                                     Stream(Purpose::kSubsampleBlock, step),
                                     /*element=*/0));
  return {block, DrawCells(Begin(block + 1) - Begin(block), step, kProposals)};
}

Cells Subsample::DrawCells(int64_t count,
                           uint64_t step,
                           uint64_t element) const {
  Cells cells;
  cells.counts.assign(static_cast<size_t>(count), 1);
  if (poisson_) {
    const NoiseStream stream = Stream(Purpose::kPoisson, step);
    uint64_t cell = element;
    for (int64_t& minibatches : cells.counts) {
      minibatches = DrawPoisson(stream, cell++);
    }
  }
  int64_t size = 0;
  for (const int64_t minibatches : cells.counts) {
    size += minibatches * batch_size_;
  }
  const NoiseStream stream = Stream(Purpose::kSubsample, step);
  cells.indices.reserve(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    cells.indices.push_back(static_cast<int64_t>(
        DrawBelow(static_cast<uint64_t>(num_data_), stream, element++)));
  }
  return cells;
}

NoiseStream Subsample::Stream(Purpose purpose, uint64_t step) const {
  if (step > static_cast<uint64_t>(kMaxStep)) {
    throw std::invalid_argument("step must be in [0, 2^48)");
  }
  return {seed_, step, static_cast<uint32_t>(purpose)};
}

}  // namespace torch_sgmcmc
