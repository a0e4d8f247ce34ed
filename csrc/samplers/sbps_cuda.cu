#include <torch/csrc/stable/library.h>

#include "apply/cuda.cuh"
#include "apply/reduce.cuh"
#include "samplers/sbps_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  torch_sgmcmc::RegisterSBPS<torch_sgmcmc::CudaDriver,
                             torch_sgmcmc::CudaReducer>(m);
}
