#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <string>
#include <vector>

#include "apply/cpu.h"
#include "apply/reduce.h"
#include "samplers/sbps_op.h"

namespace torch_sgmcmc {
namespace {

template <class T>
std::vector<double> RowAsDouble(const Tensor& row) {
  const auto* data = static_cast<const T*>(row.const_data_ptr());
  const int64_t stride = row.strides()[0];
  std::vector<double> result(static_cast<size_t>(row.numel()));
  for (double& value : result) {
    value = static_cast<double>(*data);
    data += stride;
  }
  return result;
}

std::vector<double> Row(const char* name, const Tensor& row) {
  if (row.dim() == 1 && row.numel() >= 2) {
    switch (row.scalar_type()) {
      case ScalarType::Double:
        return RowAsDouble<double>(row);
      case ScalarType::Float:
        return RowAsDouble<float>(row);
      case ScalarType::BFloat16:
        return RowAsDouble<torch::headeronly::BFloat16>(row);
      case ScalarType::Half:
        return RowAsDouble<torch::headeronly::Half>(row);
      default:
        break;
    }
  }
  Fail("sbps_moments",
       std::string(name) +
           " must be one row of at least 2 numbers in float32, float64, "
           "bfloat16 or float16");
}

// How many losses are not finite, and the mean and the sample variance of the
// derivatives, one after the other: they are few, and on the host.
Tensor SBPSMoments(Tensor losses, Tensor derivatives) {
  int64_t bad = 0;
  for (const double loss : Row("losses", losses)) {
    if (!std::isfinite(loss)) ++bad;
  }
  const std::vector<double> d = Row("derivatives", derivatives);
  double mean = 0;
  for (const double x : d) mean += x;
  mean /= static_cast<double>(d.size());
  double squares = 0;
  for (const double x : d) squares += (x - mean) * (x - mean);
  Tensor result = SumsLike(derivatives, 3);
  auto* out = static_cast<double*>(result.data_ptr());
  out[0] = static_cast<double>(bad);
  out[1] = mean;
  out[2] = squares / static_cast<double>(d.size() - 1);
  return result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  torch_sgmcmc::RegisterSBPS<torch_sgmcmc::CpuDriver, torch_sgmcmc::CpuReducer>(
      m);
  m.impl("sbps_moments", TORCH_BOX(&torch_sgmcmc::SBPSMoments));
}
