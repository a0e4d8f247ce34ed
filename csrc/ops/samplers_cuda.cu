#include <torch/csrc/stable/library.h>

#include "launch/boxed.h"
#include "launch/cuda.cuh"
#include "ops/fused_step.h"
#include "ops/sampler_operators.h"

const torch_sgmcmc::Updates& torch_sgmcmc::CudaUpdates() {
  static const UpdatesOn<CudaDriver, SamplerOperators> updates;
  return updates;
}

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CudaDriver>(SamplerOperators(), m);
}
