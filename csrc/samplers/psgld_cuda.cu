#include <torch/csrc/stable/library.h>

#include "apply/cuda.cuh"
#include "samplers/psgld_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("psgld_step_",
         TORCH_BOX(&torch_sgmcmc::PSGLDStep<torch_sgmcmc::CudaDriver>));
  m.impl("psgld_frozen_step_",
         TORCH_BOX(&torch_sgmcmc::PSGLDFrozenStep<torch_sgmcmc::CudaDriver>));
}
