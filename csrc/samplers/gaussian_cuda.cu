#include <torch/csrc/stable/library.h>

#include "apply/cuda.cuh"
#include "samplers/gaussian_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("gaussian_",
         TORCH_BOX(&torch_sgmcmc::Gaussian<torch_sgmcmc::CudaDriver>));
}
