#include <torch/csrc/stable/library.h>

#include "apply/reduce.cuh"
#include "samplers/gauge_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl(
      "gauge_sums",
      TORCH_BOX(&torch_sgmcmc::GaugeSumsOfAnyKind<torch_sgmcmc::CudaReducer>));
}
