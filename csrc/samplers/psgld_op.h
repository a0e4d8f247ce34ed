// torch_sgmcmc::psgld_step_ and psgld_frozen_step_ for any device driver.
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
               TensorList masters,
               double lr,
               double num_data,
               double prior_precision,
               double temperature,
               double decay,
               double eps,
               std::vector<int64_t> offsets,
               int64_t seed,
               int64_t step,
               std::optional<Tensor> device_step,
               double prior_mean,
               std::optional<TensorList> prior_means,
               Rows rows,
               int64_t num_chains) {
  constexpr const char* kOp = "psgld_step_";
  CheckTarget(kOp, lr, num_data, prior_precision, temperature, prior_mean);
  if (!(decay >= 0 && decay < 1)) {
    Fail(kOp,
         "Invalid decay: " + std::to_string(decay) + " (must be in [0, 1))");
  }
  CheckNumber(kOp, "eps", eps, /*positive=*/true);
  const bool corrected = !sensitivities.empty() || !curvatures.empty();
  const PSGLDCoefficients coefficients(
      lr, num_data, prior_precision, temperature, decay, eps, prior_mean);
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kUpdate);
  std::vector<Argument> arguments = {
      {"params", Role::kParameter, params},
      {"grads", Role::kGradient, grads},
      {"square_averages", Role::kState, square_averages}};
  if (corrected) {
    arguments.push_back({"sensitivities", Role::kState, sensitivities});
    arguments.push_back({"curvatures", Role::kGradient, curvatures});
  }
  arguments.push_back(PriorMeans(prior_means));
  arguments.push_back({"masters", Role::kMaster, masters});
  Plan plan(kOp, arguments, offsets, /*num_chains=*/1, {rows, num_chains});
  Driver driver(kOp, plan, device_step);
  if (corrected) {
    driver.template Apply<PSGLDCorrectedUpdate>(coefficients, stream);
  } else {
    driver.template Apply<PSGLDAdaptingUpdate>(coefficients, stream);
  }
  plan.Finish();
}

template <class Driver>
void PSGLDFrozenStep(TensorList params,
                     TensorList grads,
                     TensorList roots,
                     TensorList masters,
                     double lr,
                     double num_data,
                     double prior_precision,
                     double temperature,
                     std::vector<int64_t> offsets,
                     int64_t seed,
                     int64_t step,
                     std::optional<Tensor> device_step,
                     double prior_mean,
                     std::optional<TensorList> prior_means,
                     Rows rows,
                     int64_t num_chains) {
  constexpr const char* kOp = "psgld_frozen_step_";
  CheckTarget(kOp, lr, num_data, prior_precision, temperature, prior_mean);
  const PSGLDMoveCoefficients coefficients(
      lr, num_data, prior_precision, temperature, prior_mean);
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kUpdate);
  Plan plan(kOp,
            {{"params", Role::kParameter, params},
             {"grads", Role::kGradient, grads},
             {"roots", Role::kStatistic, roots},
             PriorMeans(prior_means),
             {"masters", Role::kMaster, masters}},
            offsets,
            /*num_chains=*/1,
            {rows, num_chains});
  Driver driver(kOp, plan, device_step);
  driver.template Apply<PSGLDFrozenUpdate>(coefficients, stream);
  plan.Finish();
}

}  // namespace torch_sgmcmc
