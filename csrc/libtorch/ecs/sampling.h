// Data drawn by weights, and what a datum is then worth:
// torch_sgmcmc/ecs/sampling.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "host/sampling_weights.h"

namespace torch_sgmcmc {

struct ECSSampling {
  at::Tensor weights;  // [N], in float64
  std::shared_ptr<const SamplingWeights> law;
  at::Tensor importance;  // [N], 1 / (N π)

  // That of checked weights. Throws if one of them is out of range.
  static std::shared_ptr<const ECSSampling> Of(const at::Tensor& weights);
  // That of a copy of what a user gives. Throws besides if they are no real
  // numbers, or not as many as data.
  static std::shared_ptr<const ECSSampling> Given(const at::Tensor& weights,
                                                  int64_t num_data,
                                                  c10::Device device);
};

}  // namespace torch_sgmcmc
