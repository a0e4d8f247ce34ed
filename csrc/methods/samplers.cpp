#include <torch/csrc/stable/library.h>

#include "apply/boxed.h"
#include "apply/cpu.h"
#include "methods/fused_step.h"
#include "methods/rows.h"

const torch_sgmcmc::Updates& torch_sgmcmc::CpuUpdates() {
  static const UpdatesOn<CpuDriver> updates;
  return updates;
}

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CpuDriver>(SamplerOperators(), m);
}
