#include <torch/csrc/stable/library.h>

#include "apply/boxed.h"
#include "apply/cuda.cuh"
#include "methods/fused_step.h"
#include "methods/rows.h"

const torch_sgmcmc::Updates& torch_sgmcmc::CudaUpdates() {
  static const UpdatesOn<CudaDriver> updates;
  return updates;
}

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CudaDriver>(SamplerOperators(), m);
}
