// The noise that belongs to a piece of work.
#pragma once

#include "torch_sgmcmc/operators.h"
#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

inline NoiseKey KeyOf(const Work& work) {
  const SamplerOptions& options = *work.options;
  if (work.gate.defined()) {
    return {work.offsets, *options.seed(), 0, work.gate};
  }
  NoiseKey key{work.offsets, *options.seed(), options.step()};
  if (options.device_step().defined()) key.device_step = options.device_step();
  return key;
}

}  // namespace torch_sgmcmc
