// torch_sgmcmc::psgld_step_ for any device driver.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "samplers/psgld.h"

namespace torch_sgmcmc {

template <class Driver>
void PSGLDStep(TensorList params,
               TensorList grads,
               TensorList square_averages,
               TensorList sensitivities,
               TensorList curvatures,
               double lr,
               double num_data,
               double prior_precision,
               double temperature,
               double decay,
               double eps,
               bool adapt,
               std::vector<int64_t> offsets,
               int64_t seed,
               int64_t step,
               std::optional<Tensor> device_step) {
  constexpr const char* kOp = "psgld_step_";
  CheckTarget(kOp, lr, num_data, prior_precision, temperature);
  if (!(decay >= 0 && decay < 1)) {
    Fail(kOp,
         "Invalid decay: " + std::to_string(decay) + " (must be in [0, 1))");
  }
  CheckNumber(kOp, "eps", eps, /*positive=*/true);
  const bool corrected = !sensitivities.empty() || !curvatures.empty();
  if (corrected && !adapt) {
    Fail(kOp,
         "sensitivities and curvatures must be empty unless adapt is True");
  }
  const PSGLDCoefficients coefficients(
      lr, num_data, prior_precision, temperature, decay, eps);
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kUpdate);
  std::vector<Argument> arguments = {{"params", Role::kParameter, params},
                                     {"grads", Role::kGradient, grads},
                                     {"square_averages",
                                      adapt ? Role::kState : Role::kStatistic,
                                      square_averages}};
  if (corrected) {
    arguments.push_back({"sensitivities", Role::kState, sensitivities});
    arguments.push_back({"curvatures", Role::kGradient, curvatures});
  }
  Plan plan(kOp, arguments, offsets);
  Driver driver(kOp, plan, device_step);
  if (corrected) {
    driver.template Apply<PSGLDCorrectedUpdate>(coefficients, stream);
  } else if (adapt) {
    driver.template Apply<PSGLDAdaptingUpdate>(coefficients, stream);
  } else {
    driver.template Apply<PSGLDFrozenUpdate>(coefficients, stream);
  }
  plan.Finish();
}

}  // namespace torch_sgmcmc
