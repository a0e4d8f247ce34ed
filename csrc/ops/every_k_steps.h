// Which steps an update is for.
//
// In a CUDA graph only the device knows the step, so an operator that does
// different things at different steps launches all of them with filters.
#pragma once

#include <cstdint>

#include "random/macros.h"

namespace torch_sgmcmc {

struct EveryKSteps {
  int64_t every = 0;         // 0: all steps
  bool on_multiples = true;  // of `every`, or on all other steps

  SG_HOST_DEVICE bool Skips(uint64_t step) const {
    return every != 0 &&
           (step % static_cast<uint64_t>(every) == 0) != on_multiples;
  }
};

}  // namespace torch_sgmcmc
