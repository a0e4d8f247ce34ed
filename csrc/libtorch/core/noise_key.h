// The noise that belongs to a piece of work.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "torch_sgmcmc/sampler.h"

namespace torch_sgmcmc {

// `device_step`, an int64 scalar on the tensors' device, is added to `step`;
// negative, it leaves everything as it is.
struct NoiseKey {
  at::IntArrayRef offsets;
  int64_t seed = 0;
  int64_t step = 0;
  std::optional<at::Tensor> device_step = std::nullopt;
};

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
