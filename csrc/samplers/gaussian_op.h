// torch_sgmcmc::gaussian_ for any device driver.
#pragma once

#include <optional>
#include <vector>

#include "apply/plan.h"
#include "samplers/gaussian.h"

namespace torch_sgmcmc {

template <class Driver>
void Gaussian(TensorList out,
              double std,
              std::vector<int64_t> offsets,
              int64_t seed,
              int64_t step,
              int64_t purpose,
              std::optional<Tensor> device_step,
              Rows rows,
              int64_t num_chains) {
  constexpr const char* kOp = "gaussian_";
  CheckNumber(kOp, "std", std);
  const NoiseStream stream = MakeStream(kOp, seed, step, purpose);
  // The device may leave `out` as it is, which must then be known.
  const Role role = device_step ? Role::kParameter : Role::kOutput;
  Plan plan(
      kOp, {{"out", role, out}}, offsets, /*num_chains=*/1, {rows, num_chains});
  Driver driver(kOp, plan, device_step);
  driver.template Apply<GaussianFill>(GaussianCoefficients{std}, stream);
  plan.Finish();
}

}  // namespace torch_sgmcmc
