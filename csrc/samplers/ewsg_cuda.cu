#include <torch/csrc/stable/library.h>

#include "apply/reduce.cuh"
#include "samplers/ewsg_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("ewsg_log_ratio",
         TORCH_BOX(&torch_sgmcmc::EWSGLogRatios<torch_sgmcmc::CudaReducer>));
}
