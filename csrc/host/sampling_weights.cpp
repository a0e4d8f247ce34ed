#include "host/sampling_weights.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "core/range.h"
#include "host/uniforms.h"

namespace torch_sgmcmc {
namespace {

constexpr double kLeastShare = 0x1p-40;

[[noreturn]] void Refuse(double weight, int64_t at, const char* wanted) {
  throw std::invalid_argument("Invalid sampling_weights: " + Shortest(weight) +
                              " at " + std::to_string(at) + " (must be " +
                              wanted + ")");
}

}  // namespace

SamplingWeights::SamplingWeights(const double* weights, int64_t size) {
  if (size < 1) {
    throw std::invalid_argument(
        "Invalid sampling_weights: there are none (must be one for each "
        "datum)");
  }
  sums_.reserve(static_cast<size_t>(size));
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    sum += weights[i];
    if (!(weights[i] > 0) || !std::isfinite(sum)) {
      Refuse(weights[i], i, "> 0 and finite, as their sum");
    }
    sums_.push_back(sum);
  }
  for (int64_t i = 0; i < size; ++i) {
    if (!(weights[i] >= kLeastShare * sum)) {
      Refuse(weights[i], i, "at least 2^-40 of their sum");
    }
  }
}

int64_t SamplingWeights::Draw(const NoiseStream& stream,
                              uint64_t element) const {
  const double place = Uniforms(stream, element << 16).first * sums_.back();
  const auto found = std::upper_bound(sums_.begin(), sums_.end(), place);
  // The product may be rounded up to the whole sum.
  return std::min<int64_t>(found - sums_.begin(), size() - 1);
}

}  // namespace torch_sgmcmc
