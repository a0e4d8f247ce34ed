#include <torch/csrc/stable/library.h>

#include "apply/boxed.h"
#include "apply/cuda.cuh"
#include "apply/reduce.cuh"
#include "methods/rows.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CudaDriver>(UpdateOperators(), m);
  Register<CudaReducer>(SumOperators(), m);
}
