#include <torch/csrc/stable/library.h>

#include "launch/boxed.h"
#include "launch/cpu.h"
#include "launch/reduce.h"
#include "ops/fused_step.h"
#include "ops/other_operators.h"

double torch_sgmcmc::LogRatioOf(const Call& call) {
  return *static_cast<const double*>(
      Sum<EWSGLogRatios, CpuReducer>(call).data_ptr());
}

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CpuDriver>(UpdateOperators(), m);
  Register<CpuReducer>(SumOperators(), m);
}
