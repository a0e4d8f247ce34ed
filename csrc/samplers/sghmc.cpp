#include <torch/csrc/stable/library.h>

#include "apply/cpu.h"
#include "samplers/sghmc_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  using torch_sgmcmc::CpuDriver;
  m.impl("sghmc_step_", TORCH_BOX(&torch_sgmcmc::SGHMCStep<CpuDriver>));
  m.impl("sghmc_by_coordinate_step_",
         TORCH_BOX(&torch_sgmcmc::SGHMCByCoordinateStep<CpuDriver>));
  m.impl("gradient_variance_",
         TORCH_BOX(&torch_sgmcmc::GradientVarianceStep<CpuDriver>));
}
