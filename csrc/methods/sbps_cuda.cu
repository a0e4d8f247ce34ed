#include <torch/csrc/stable/library.h>

#include "apply/boxed.h"
#include "apply/cuda.cuh"
#include "apply/reduce.cuh"
#include "methods/sbps.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CudaDriver, SBPSPlace, SBPSReflect, SBPSAdapt, SBPSPrecondition>(m);
  Register<CudaReducer,
           SBPSReflectSums,
           SBPSPreconditionSums,
           SBPSSumsOfLine,
           SBPSSumsOfReflection,
           SBPSSumOfPreconditioner>(m);
}
