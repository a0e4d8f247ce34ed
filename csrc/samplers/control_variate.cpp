#include <torch/csrc/stable/library.h>

#include "apply/cpu.h"
#include "samplers/control_variate_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("control_variate_",
         TORCH_BOX(&torch_sgmcmc::ControlVariate<torch_sgmcmc::CpuDriver>));
}
