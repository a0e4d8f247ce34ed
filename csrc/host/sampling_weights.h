// Draws data with probabilities that are proportional to given weights, with
// replacement, by inversion of their distribution.
#pragma once

#include <cstdint>
#include <vector>

#include "core/counter.h"

namespace torch_sgmcmc {

class SamplingWeights {
 public:
  // Throws std::invalid_argument unless each weight is finite and at least
  // 2^-40 of their sum, which is finite: a uniform number has 52 bits, and sums
  // are rounded, so that each probability is right to 2^-12 of itself.
  SamplingWeights(const double* weights, int64_t size);

  int64_t size() const { return static_cast<int64_t>(sums_.size()); }
  // Of all weights w; 1 / (N π_k) is this over w_k.
  double mean() const { return sums_.back() / static_cast<double>(size()); }
  // One datum: a function of the stream and the element.
  int64_t Draw(const NoiseStream& stream, uint64_t element) const;

 private:
  std::vector<double> sums_;  // of the weights up to each
};

}  // namespace torch_sgmcmc
