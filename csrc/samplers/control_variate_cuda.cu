#include <torch/csrc/stable/library.h>

#include "apply/cuda.cuh"
#include "samplers/control_variate_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("control_variate_",
         TORCH_BOX(&torch_sgmcmc::ControlVariate<torch_sgmcmc::CudaDriver>));
}
