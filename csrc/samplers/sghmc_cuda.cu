#include <torch/csrc/stable/library.h>

#include "apply/cuda.cuh"
#include "samplers/sghmc_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  using torch_sgmcmc::CudaDriver;
  m.impl("sghmc_step_", TORCH_BOX(&torch_sgmcmc::SGHMCStep<CudaDriver>));
  m.impl("sghmc_by_coordinate_step_",
         TORCH_BOX(&torch_sgmcmc::SGHMCByCoordinateStep<CudaDriver>));
  m.impl("gradient_variance_",
         TORCH_BOX(&torch_sgmcmc::GradientVarianceStep<CudaDriver>));
}
