#include <torch/csrc/stable/library.h>

#include "apply/boxed.h"
#include "apply/cpu.h"
#include "apply/reduce.h"
#include "methods/fused_step.h"
#include "methods/rows.h"

double torch_sgmcmc::LogRatioOf(const Call& call) {
  return *static_cast<const double*>(
      Sum<EWSGLogRatios, CpuReducer>(call).data_ptr());
}

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  Register<CpuDriver>(UpdateOperators(), m);
  Register<CpuReducer>(SumOperators(), m);
}
