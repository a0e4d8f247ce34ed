#include <torch/csrc/stable/library.h>

#include "launch/boxed.h"
#include "launch/cuda.cuh"
#include "launch/reduce.cuh"
#include "ops/other_operators.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CudaDriver>(UpdateOperators(), m);
  Register<CudaReducer>(SumOperators(), m);
}
