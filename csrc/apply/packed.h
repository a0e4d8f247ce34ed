// A call of a sampler's step of what was packed (core/packed_call.h).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "apply/call.h"
#include "core/packed_call.h"
#include "core/row.h"

namespace torch_sgmcmc {

// Throws std::runtime_error unless the argument of this name has the words of a
// call.
PackedCall Unpacked(const char* op, const char* name, const Tensor& packed);

// The call of a row's operator; `state` has all of its lists but the first two,
// and the prior's means. Throws std::runtime_error where these are not what was
// packed.
Call CallOf(const char* op,
            const Row& row,
            const PackedCall& packed,
            TensorList params,
            TensorList grads,
            const TensorList& state,
            int64_t step);

}  // namespace torch_sgmcmc
