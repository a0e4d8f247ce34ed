#include <torch/csrc/stable/library.h>

#include "launch/boxed.h"
#include "launch/cpu.h"
#include "ops/fused_step.h"
#include "ops/sampler_operators.h"

const torch_sgmcmc::Updates& torch_sgmcmc::CpuUpdates() {
  static const UpdatesOn<CpuDriver, SamplerOperators> updates;
  return updates;
}

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CpuDriver>(SamplerOperators(), m);
}
