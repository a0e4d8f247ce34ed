#include <torch/csrc/stable/library.h>

#include "apply/cpu.h"
#include "samplers/gaussian_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("gaussian_",
         TORCH_BOX(&torch_sgmcmc::Gaussian<torch_sgmcmc::CpuDriver>));
}
