#include <torch/csrc/stable/library.h>

#include "apply/cpu.h"
#include "apply/reduce.h"
#include "samplers/sbps_op.h"

namespace torch_sgmcmc {
namespace {

// Mean and sample variance of a row, one after the other: it is short, and on
// the host.
Tensor SBPSMoments(Tensor derivatives) {
  const int64_t n = derivatives.numel();
  if (derivatives.scalar_type() != ScalarType::Double ||
      derivatives.dim() != 1 || !derivatives.is_contiguous() || n < 2) {
    Fail("sbps_moments",
         "derivatives must be one contiguous row of at least 2 float64");
  }
  const auto* d = static_cast<const double*>(derivatives.data_ptr());
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += d[i];
  mean /= static_cast<double>(n);
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += (d[i] - mean) * (d[i] - mean);
  Tensor result = SumsLike(derivatives, 2);
  auto* out = static_cast<double*>(result.data_ptr());
  out[0] = mean;
  out[1] = squares / static_cast<double>(n - 1);
  return result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  torch_sgmcmc::RegisterSBPS<torch_sgmcmc::CpuDriver, torch_sgmcmc::CpuReducer>(
      m);
  m.impl("sbps_moments", TORCH_BOX(&torch_sgmcmc::SBPSMoments));
}
