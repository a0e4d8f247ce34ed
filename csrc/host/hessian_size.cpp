#include "host/hessian_size.h"

#include <stdexcept>
#include <string>

namespace torch_sgmcmc {
namespace {

constexpr int64_t kMostParameters = 11'585;  // whose square of doubles is 1 GiB

}  // namespace

void CheckHessianSize(int64_t num_parameters) {
  if (num_parameters <= kMostParameters) return;
  const auto d = static_cast<double>(num_parameters);
  throw std::invalid_argument(
      "Invalid order: 2 (the Hessian of " + std::to_string(num_parameters) +
      " parameters takes " + std::to_string(d * d * sizeof(double) / 1e9) +
      " GB, must be at most that of " + std::to_string(kMostParameters) +
      ": use order 1)");
}

}  // namespace torch_sgmcmc
