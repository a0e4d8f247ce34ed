// From lists of tensors to flat arrays: checks, memory layouts, offsets.
//
// A plan is what remains of an operator's arguments when everything that can be
// wrong has been ruled out: for each tensor, one pointer per argument to arrays
// of equal length and order. The order is the parameter's memory order if it is
// dense in any memory format, so dense tensors are worked on in place; a tensor
// with other strides (or a gradient laid out differently from its parameter)
// goes through a temporary copy. Building a plan changes nothing; an error
// leaves all tensors as they were.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/counter.h"

namespace torch_sgmcmc {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

using Rows = std::optional<std::vector<int64_t>>;

// The numbering of elements of shards, or of chains that have their own
// seeds (the
// Notes below).
struct Numbering {
  Rows rows = std::nullopt;
  int64_t num_chains = 0;
};

// One tensor-list argument of an operator. One with Role::kMaster has a tensor
// for each of the parameters that are in bfloat16 or float16, in their order;
// all others have one for every parameter, or with Role::kPriorMean none.
struct Argument {
  const char* name;
  Role role;
  const TensorList& tensors;
};

// The means of the priors, which refers to `tensors`.
Argument PriorMeans(const std::optional<TensorList>& tensors);

// The arrays that belong to one parameter.
//
// Note [Rows of shards]
// A shard of a parameter has the element indices that the whole one gives it.
// If it is cut along another dimension than the first, these come in rows: the
// index of element k is offset + k / row * pitch + k % row.
//
// Note [Chains side by side]
// Tensors may hold several chains, of which each is the one that would run
// alone with its own seed: chain k draws with ChainSeed(seed, k), and its
// elements are numbered as if there were no others. A segment then has the
// elements of all chains, one after the other, until a driver takes them apart.
struct Segment {
  void* data[kMaxArguments];     // in the order of arguments, but see SlotOf
  uint8_t bytes[kMaxArguments];  // of an element of each
  int64_t numel;
  uint64_t offset;  // element index of the first element in the noise stream
  int64_t row;      // 0: all of its elements are one
  int64_t pitch;
  ScalarType dtype;
  int64_t num_chains;  // 0: there is but one, with the operator's seed
  int64_t chain;       // which of them, if they are apart
};

// A chain's part of a segment, whose elements are then counted for one chain.
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

// The element index of a segment's element.
inline uint64_t IndexOf(const Segment& s, int64_t position) {
  if (s.row == 0) return s.offset + static_cast<uint64_t>(position);
  const int64_t k = position / s.row;
  return s.offset + static_cast<uint64_t>(k * (s.pitch - s.row) + position);
}

// Where the row of an element ends.
inline int64_t RowEnd(const Segment& s, int64_t position) {
  return s.row == 0 ? s.numel : (position / s.row + 1) * s.row;
}

// True if blocks of noise that begin at any of its quads are all within 2^32
// quads, as NoiseSource has it (random/noise.inl); in rows only, since others
// begin where blocks do.
inline bool StartsAtQuads(const Segment& s) {
  constexpr int kBits = 34;  // of an element index
  return s.row > 0 && s.offset >> kBits ==
                          (IndexOf(s, s.numel - 1) + 2 * kNoiseBlock) >> kBits;
}

// Whether, besides, its elements are less than 2^32 apart.
inline bool SpansLittle(const Segment& s) {
  return StartsAtQuads(s) && (IndexOf(s, s.numel - 1) - s.offset) >> 32 == 0;
}

// True if rows leave little of their last block of noise over, if their blocks
// begin at their first quad.
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
  // Throws std::runtime_error naming the operator, the argument, its index,
  // what was expected and what was got. With num_chains > 1 every tensor must
  // have a leading dimension of that size, and each chain's elements follow
  // each other in the arrays. `rows` has two numbers for each tensor, row and
  // pitch; elements of one that has rows are in row-major order. Chains with
  // their own seeds are such chains, too.
  Plan(const char* op, const std::vector<Argument>& arguments,
       const std::vector<int64_t>& offsets, int64_t num_chains = 1,
       const Numbering& numbering = {});

  const std::vector<Segment>& segments() const { return segments_; }
  // The j-th argument alone, as arrays of the arithmetic type.
  std::vector<Segment> ArithmeticArgument(int j) const;
  bool on_cuda() const { return on_cuda_; }
  int32_t device_index() const { return device_index_; }

  // Copies results held in temporaries to where they belong. Call once, after
  // the update.
  void Finish();

 private:
  struct CopyBack {
    Tensor destination;
    Tensor source;
  };

  std::vector<Segment> segments_;
  std::vector<Tensor> keep_alive_;
  std::vector<CopyBack> copy_backs_;
  bool on_cuda_ = false;
  int32_t device_index_ = -1;
};

// Validates the counter arguments of an operator.
NoiseStream MakeStream(const char* op, int64_t seed, int64_t step,
                       int64_t purpose);
NoiseStream MakeStream(const char* op, int64_t seed, int64_t step,
                       Purpose purpose);

// The address of an operator's `device_step`, null if it was not given. Throws
// unless it is a single int64 on the plan's device.
const int64_t* DeviceStep(const char* op, const Plan& plan,
                          const std::optional<Tensor>& device_step);
const int64_t* DeviceStep(const char* op, bool on_cuda, int32_t device_index,
                          const std::optional<Tensor>& device_step);

// Throws std::runtime_error unless the value is in its range.
void CheckNumber(const char* op, const char* name, double value,
                 const Range& range = {});

// Throws std::runtime_error unless the value is at least `least`.
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
