#include <torch/csrc/stable/library.h>

#include "apply/cuda.cuh"
#include "apply/reduce.cuh"
#include "samplers/hmc_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  using torch_sgmcmc::CudaDriver;
  using torch_sgmcmc::CudaReducer;
  m.impl("hmc_momenta_", TORCH_BOX(&torch_sgmcmc::HMCMomenta<CudaDriver>));
  m.impl("hmc_leapfrog_", TORCH_BOX(&torch_sgmcmc::HMCLeapfrog<CudaDriver>));
  m.impl("hmc_energy", TORCH_BOX(&torch_sgmcmc::HMCEnergies<CudaReducer>));
}
