#include <torch/csrc/stable/library.h>

#include "apply/cpu.h"
#include "samplers/sgld_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("sgld_step_",
         TORCH_BOX(&torch_sgmcmc::SGLDStep<torch_sgmcmc::CpuDriver>));
}
