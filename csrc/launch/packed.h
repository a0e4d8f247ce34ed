// The calls of a step that was packed (launch/packed_step.h).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "launch/call.h"
#include "launch/packed_step.h"
#include "ops/op_spec.h"

namespace torch_sgmcmc {

// Throws std::runtime_error unless the argument is a packed step.
PackedStep Unpacked(const char* op, const char* name, const Tensor& packed);

// The tensors of a packed step, call by call.
class PackedTensors {
 public:
  PackedTensors(const char* op, const TensorList& params,
                const TensorList& grads, const TensorList& state);

  // The next call: `state` has its lists after the first two, then prior means.
  // Throws std::runtime_error if these do not fit.
  Call Next(const OpSpec& spec, const PackedCall& packed);
  // Throws std::runtime_error if tensors are left over.
  void CheckIsEmpty() const;

 private:
  TensorList Take(const TensorList& tensors, int64_t& taken, int64_t length);

  const char* op_;
  const TensorList& params_;
  const TensorList& grads_;
  const TensorList& state_;
  int64_t num_params_ = 0;
  int64_t num_grads_ = 0;
  int64_t num_state_ = 0;
};

}  // namespace torch_sgmcmc
