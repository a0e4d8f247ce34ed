#include <torch/csrc/stable/library.h>

#include "apply/reduce.h"
#include "samplers/gauge_op.h"

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl(
      "gauge_sums",
      TORCH_BOX(&torch_sgmcmc::GaugeSumsOfAnyKind<torch_sgmcmc::CpuReducer>));
}
