#include "host/minibatch.h"

#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "random/portable_noise.h"

namespace torch_sgmcmc {
namespace {

[[noreturn]] void Invalid(const std::string& name, int64_t value,
                          const std::string& wanted) {
  throw std::invalid_argument("Invalid " + name + ": " + std::to_string(value) +
                              " (must be " + wanted + ")");
}

void CheckSizes(int64_t num_data, int64_t batch_size, int64_t count,
                bool replacement, const NoiseStream& stream) {
  if (num_data < 1) Invalid("num_data", num_data, ">= 1");
  if (batch_size < 1 || (!replacement && batch_size > num_data)) {
    Invalid("batch_size", batch_size,
            replacement ? ">= 1" : "in [1, " + std::to_string(num_data) + "]");
  }
  if (count < 0) Invalid("count", count, ">= 0");
  constexpr auto kMost = static_cast<uint64_t>(kMaxStep);
  if (stream.step > kMost) {
    throw std::invalid_argument("step must be in [0, 2^48)");
  }
  if (static_cast<uint64_t>(count) > kMost - stream.step + 1) {
    throw std::invalid_argument("step + count must be at most 2^48");
  }
}

// The first places of a Fisher-Yates shuffle of 0, ..., size - 1; keeps only
// moved elements.
class PartialShuffle {
 public:
  PartialShuffle(int64_t size, int64_t places) : size_(size) {
    moved_.reserve(static_cast<size_t>(places));
  }

  int64_t Next(const NoiseStream& stream, uint64_t element) {
    const int64_t chosen =
        next_ + static_cast<int64_t>(DrawBelow(
                    static_cast<uint64_t>(size_ - next_), stream, element));
    const int64_t result = At(chosen);
    moved_[chosen] = At(next_);
    ++next_;
    return result;
  }

 private:
  int64_t At(int64_t place) const {
    const auto found = moved_.find(place);
    return found == moved_.end() ? place : found->second;
  }

  int64_t size_;
  int64_t next_ = 0;
  std::unordered_map<int64_t, int64_t> moved_;
};

// The places of a rank in consecutive minibatches, whose size is a multiple of
// the number of ranks.
std::vector<int64_t> PlacesOf(const Share& share, std::vector<int64_t> all) {
  if (share.num_replicas == 1) return all;
  const auto distance = static_cast<size_t>(share.num_replicas);
  size_t kept = 0;
  for (auto i = static_cast<size_t>(share.rank); i < all.size();
       i += distance) {
    all[kept++] = all[i];
  }
  all.resize(kept);
  return all;
}

}  // namespace

void CheckShare(int64_t batch_size, const Share& share) {
  const std::string replicas =
      "num_replicas = " + std::to_string(share.num_replicas);
  if (share.num_replicas < 1) {
    Invalid("num_replicas", share.num_replicas, ">= 1");
  }
  if (share.rank < 0) Invalid("rank", share.rank, ">= 0");
  if (share.rank >= share.num_replicas) {
    Invalid("rank", share.rank, "below " + replicas);
  }
  if (batch_size % share.num_replicas != 0) {
    Invalid("batch_size", batch_size,
            "a multiple of " + replicas +
                ": gradients of ranks enter their mean alike");
  }
}

uint64_t DrawBelow(uint64_t bound, const NoiseStream& stream,
                   uint64_t element) {
  // Random bits beyond the largest multiple of bound are rejected.
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  const uint64_t rest = (kMax % bound + 1) % bound;
  for (uint64_t quad = element << 16;; ++quad) {
    uint32_t w[4];
    portable::QuadWords(stream, quad, w);
    const uint64_t bits = static_cast<uint64_t>(w[0]) << 32 | w[1];
    if (bits <= kMax - rest) return bits % bound;
  }
}

std::vector<int64_t> DrawMinibatches(int64_t num_data, int64_t batch_size,
                                     int64_t count, bool replacement,
                                     NoiseStream stream, const Share& share) {
  CheckSizes(num_data, batch_size, count, replacement, stream);
  CheckShare(batch_size, share);
  std::vector<int64_t> result;
  result.reserve(static_cast<size_t>(count * batch_size));
  for (int64_t k = 0; k < count; ++k, ++stream.step) {
    PartialShuffle shuffle(num_data, replacement ? 0 : batch_size);
    for (int64_t i = 0; i < batch_size; ++i) {
      const auto element = static_cast<uint64_t>(i);
      result.push_back(
          replacement ? static_cast<int64_t>(DrawBelow(
                            static_cast<uint64_t>(num_data), stream, element))
                      : shuffle.Next(stream, element));
    }
  }
  return PlacesOf(share, std::move(result));
}

}  // namespace torch_sgmcmc
