// What operators of steps that are made again ask of those with rows.
#pragma once

#include <cstdint>

#include "apply/call.h"
#include "core/packed_call.h"

namespace torch_sgmcmc {

// Makes a sampler's step on the CPU, of what was packed. Whatever is thrown,
// nothing has changed.
void PerformStep(const char* op,
                 const PackedCall& packed,
                 TensorList params,
                 TensorList grads,
                 const TensorList& state,
                 int64_t step);

// The log ratio of a proposed minibatch to the current one, on the CPU.
double LogRatioOf(const Call& call);

}  // namespace torch_sgmcmc
