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
#include <string>
#include <vector>

#include "core/counter.h"
#include "core/roles.h"

namespace torch_sgmcmc {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

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
struct Segment {
  void* data[kMaxArguments];  // in the order of arguments, but see SlotOf
  int64_t numel;
  uint64_t offset;  // element index of the first element in the noise stream
  ScalarType dtype;
};

class Plan {
 public:
  // Throws std::runtime_error naming the operator, the argument, its index,
  // what was expected and what was got. With num_chains > 1 every tensor must
  // have a leading dimension of that size, and each chain's elements follow
  // each other in the arrays.
  Plan(const char* op,
       const std::vector<Argument>& arguments,
       const std::vector<int64_t>& offsets,
       int64_t num_chains = 1);

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
NoiseStream MakeStream(const char* op,
                       int64_t seed,
                       int64_t step,
                       int64_t purpose);
NoiseStream MakeStream(const char* op,
                       int64_t seed,
                       int64_t step,
                       Purpose purpose);

// The address of an operator's `device_step`, null if it was not given. Throws
// unless it is a single int64 on the plan's device.
const int64_t* DeviceStep(const char* op,
                          const Plan& plan,
                          const std::optional<Tensor>& device_step);
const int64_t* DeviceStep(const char* op,
                          bool on_cuda,
                          int32_t device_index,
                          const std::optional<Tensor>& device_step);

// Throws std::runtime_error unless the value is finite and not negative (or,
// with `positive`, greater than zero).
void CheckNumber(const char* op,
                 const char* name,
                 double value,
                 bool positive = false);

// Throws std::runtime_error unless the value is finite.
void CheckFinite(const char* op, const char* name, double value);

// The hyperparameters that every sampler has.
void CheckTarget(const char* op,
                 double lr,
                 double num_data,
                 double prior_precision,
                 double temperature,
                 double prior_mean);

[[noreturn]] void Fail(const char* op, const std::string& message);

}  // namespace torch_sgmcmc
