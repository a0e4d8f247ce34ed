#include <torch/csrc/stable/library.h>

#include "apply/cpu.h"
#include "samplers/sgnht_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("sgnht_step_",
         TORCH_BOX(&torch_sgmcmc::SGNHTStep<torch_sgmcmc::CpuDriver>));
}
