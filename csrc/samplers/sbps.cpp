#include <torch/csrc/stable/library.h>

#include "apply/cpu.h"
#include "apply/reduce.h"
#include "samplers/sbps_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  torch_sgmcmc::RegisterSBPS<torch_sgmcmc::CpuDriver, torch_sgmcmc::CpuReducer>(
      m);
}
