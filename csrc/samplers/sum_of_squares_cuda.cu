#include <torch/csrc/stable/library.h>

#include "apply/reduce.cuh"
#include "samplers/sum_of_squares_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("sum_of_squares",
         TORCH_BOX(&torch_sgmcmc::SumOfSquares<torch_sgmcmc::CudaReducer>));
}
