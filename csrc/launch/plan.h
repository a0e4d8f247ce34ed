// From lists of tensors to flat arrays: checks, memory layouts, offsets.
//
// A plan has an operator's checked arguments: for each parameter, one pointer
// per argument to arrays of equal length in row-major order: an element's noise
// does not depend on memory formats. Tensors that are not contiguous go through
// temporary copies. Building a plan changes no tensor.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/counter.h"

namespace torch_sgmcmc {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// Calls use(an element) for a parameter's dtype.
void WithElement(ScalarType dtype, const auto& use) {
  switch (dtype) {
    case ScalarType::Double:
      return use(double{});
    case ScalarType::BFloat16:
      return use(torch::headeronly::BFloat16{});
    case ScalarType::Half:
      return use(torch::headeronly::Half{});
    default:
      return use(float{});
  }
}

using Rows = std::optional<std::vector<int64_t>>;

// The element numbers of shards, or of chains with seeds (the Notes below).
struct Numbering {
  Rows rows = std::nullopt;
  int64_t num_chains = 0;
};

// A list argument of an operator: a tensor for each parameter, with
// Role::kMaster for those in bfloat16 or float16, with Role::kPriorMean or
// none.
struct Argument {
  const char* name;
  Role role;
  const TensorList& tensors;
};

Argument PriorMeans(const std::optional<TensorList>& tensors);

// The arrays of one parameter.
//
// Note [Rows of shards]
// A shard's elements have the whole parameter's indices. Cut along another
// dimension than the first, they come in rows: element k has the index offset +
// k / row * pitch + k % row.
//
// Note [Chains side by side]
// Tensors may hold several chains. Chain k draws with ChainSeed(seed, k), and
// its elements are numbered as if it were alone. A segment has the elements of
// all chains, one after the other, until a driver separates them.
struct Segment {
  void* data[kMaxArguments];     // in the order of arguments, but see SlotOf
  uint8_t bytes[kMaxArguments];  // of an element of each
  int64_t numel;
  uint64_t offset;  // element index of the first element in the noise stream
  int64_t row;      // 0: all of its elements are one
  int64_t pitch;
  ScalarType dtype;
  int64_t num_chains;  // 0: one chain, with the operator's seed
  int64_t chain;       // the chain of a separated segment
};

inline Segment OfChain(const Segment& s, int64_t chain) {
  Segment own = s;
  own.numel = s.numel / s.num_chains;
  own.chain = chain;
  for (int j = 0; j < kMaxArguments; ++j) {
    if (s.data[j] == nullptr) continue;
    own.data[j] =
        static_cast<char*>(s.data[j]) + chain * own.numel * s.bytes[j];
  }
  return own;
}

inline uint64_t IndexOf(const Segment& s, int64_t position) {
  if (s.row == 0) return s.offset + static_cast<uint64_t>(position);
  const int64_t k = position / s.row;
  return s.offset + static_cast<uint64_t>(k * (s.pitch - s.row) + position);
}

inline int64_t RowEnd(const Segment& s, int64_t position) {
  return s.row == 0 ? s.numel : (position / s.row + 1) * s.row;
}

// True if blocks of noise may begin at any quad of a row (NoiseSource needs all
// within 2^32 quads, random/noise.inl).
inline bool StartsAtQuads(const Segment& s) {
  constexpr int kBits = 34;  // of an element index
  return s.row > 0 && s.offset >> kBits ==
                          (IndexOf(s, s.numel - 1) + 2 * kNoiseBlock) >> kBits;
}

// True if also all elements are less than 2^32 apart.
inline bool SpansLittle(const Segment& s) {
  return StartsAtQuads(s) && (IndexOf(s, s.numel - 1) - s.offset) >> 32 == 0;
}

// True if rows waste little of their last block of noise.
inline bool FillsBlocks(const Segment& s) {
  const auto skip =
      s.pitch % 4 == 0 ? static_cast<int64_t>(s.offset % 4) : int64_t{3};
  const int64_t last = (skip + s.row - 1) % kNoiseBlock + 1;
  return 8 * (kNoiseBlock - last) <= s.row;
}

// True if rows are whole quads of noise.
inline bool IsOfQuads(const Segment& s) {
  return s.offset % 4 == 0 && s.row % 4 == 0 && s.pitch % 4 == 0;
}

class Plan {
 public:
  // Throws std::runtime_error with operator, argument, index, expected and
  // found. With num_chains > 1 every tensor has a leading dimension of chains,
  // whose elements are contiguous in the arrays. `rows` has row and pitch of
  // each tensor; elements with rows are in row-major order.
  Plan(const char* op, const std::vector<Argument>& arguments,
       const std::vector<int64_t>& offsets, int64_t num_chains = 1,
       const Numbering& numbering = {});

  const std::vector<Segment>& segments() const { return segments_; }
  // The j-th argument alone, as arrays of the arithmetic type.
  std::vector<Segment> ArithmeticArgument(int j) const;
  bool on_cuda() const { return on_cuda_; }
  int32_t device_index() const { return device_index_; }

  // Copies results from temporaries. Call once, after the update.
  void Finish();

 private:
  struct CopyBack {
    Tensor destination;
    Tensor source;
  };

  void CheckTensors(const char* op, const std::vector<Argument>& arguments,
                    const std::vector<int64_t>& offsets,
                    std::optional<int64_t> chains, const Rows& rows);
  void CheckPlace(const char* op, const Argument& first, const Argument& a,
                  size_t place) const;
  void TakeMemory(const std::vector<Argument>& arguments, size_t i,
                  size_t& master, Segment& segment);

  std::vector<Segment> segments_;
  std::vector<Tensor> keep_alive_;
  std::vector<CopyBack> copy_backs_;
  bool on_cuda_ = false;
  int32_t device_index_ = -1;
};

NoiseStream MakeStream(const char* op, int64_t seed, int64_t step,
                       int64_t purpose);
NoiseStream MakeStream(const char* op, int64_t seed, int64_t step,
                       Purpose purpose);

// The address of `device_step`, null without one. Throws unless it is one int64
// on the plan's device.
const int64_t* DeviceStep(const char* op, const Plan& plan,
                          const std::optional<Tensor>& device_step);
const int64_t* DeviceStep(const char* op, bool on_cuda, int32_t device_index,
                          const std::optional<Tensor>& device_step);

void CheckNumber(const char* op, const char* name, double value,
                 const Range& range = {});

void CheckCount(const char* op, const char* name, int64_t value, int64_t least);

// Throws std::runtime_error with the operator and the parts of a message.
template <typename... Part>
[[noreturn]] void Fail(const char* op, const Part&... parts) {
  std::ostringstream message;
  message << "torch_sgmcmc::" << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace torch_sgmcmc
