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
  // Of tensors that hold several, of which each has a seed of its own; or 0.
  int64_t num_chains = 0;
};

inline NoiseKey KeyOf(const Work& work) {
  const SamplerOptions& options = *work.options;
  NoiseKey key{work.offsets, work.seed};
  key.num_chains = options.chains_with_seeds();
  if (work.gate.defined()) {
    key.device_step = work.gate;
    return key;
  }
  key.step = work.step.host;
  if (work.step.is_on_device()) key.device_step = work.step.device;
  return key;
}

}  // namespace torch_sgmcmc
