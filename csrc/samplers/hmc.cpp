#include <torch/csrc/stable/library.h>

#include "apply/cpu.h"
#include "apply/reduce.h"
#include "samplers/hmc_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  using torch_sgmcmc::CpuDriver;
  using torch_sgmcmc::CpuReducer;
  m.impl("hmc_momenta_", TORCH_BOX(&torch_sgmcmc::HMCMomenta<CpuDriver>));
  m.impl("hmc_leapfrog_", TORCH_BOX(&torch_sgmcmc::HMCLeapfrog<CpuDriver>));
  m.impl("hmc_energy", TORCH_BOX(&torch_sgmcmc::HMCEnergies<CpuReducer>));
}
