// torch_sgmcmc::sghmc_step_ and gradient_variance_ for any device driver.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "samplers/gaussian.h"
#include "samplers/gradient_variance.h"
#include "samplers/sghmc.h"

namespace torch_sgmcmc {

// Throws unless the numbers are in their ranges.
inline SGHMCCoefficients CheckedSGHMC(const char* op,
                                      double lr,
                                      double momentum,
                                      double num_data,
                                      double prior_precision,
                                      double temperature,
                                      double noise_estimate,
                                      int64_t resample_momentum_every,
                                      double prior_mean) {
  CheckTarget(op, lr, num_data, prior_precision, temperature, prior_mean);
  if (!(momentum >= 0 && momentum < 1)) {
    Fail(op,
         "Invalid momentum: " + std::to_string(momentum) +
             " (must be in [0, 1))");
  }
  CheckNumber(op, "noise_estimate", noise_estimate);
  if (resample_momentum_every < 0) {
    Fail(op,
         "Invalid resample_momentum_every: " +
             std::to_string(resample_momentum_every) + " (must be >= 0)");
  }
  return {lr,
          momentum,
          num_data,
          prior_precision,
          temperature,
          noise_estimate,
          prior_mean};
}

// The update, before every k-th of which momenta are draw_std times normals.
template <template <class> class Update, class Driver, class Coefficients>
void UpdateMomenta(const Driver& driver,
                   const Plan& plan,
                   const Coefficients& coefficients,
                   const NoiseStream& stream,
                   double draw_std,
                   int64_t every) {
  if (every == 0) {
    driver.template Apply<Update>(coefficients, stream);
    return;
  }
  NoiseStream draws = stream;
  draws.purpose = static_cast<decltype(draws.purpose)>(Purpose::kMomentum);
  driver.template Apply<GaussianFill>(
      GaussianCoefficients{draw_std, {every, true}},
      draws,
      plan.ArithmeticArgument(2));
  driver.template Apply<Update>(coefficients.AfterDraw(every), stream);
  driver.template Apply<Update>(coefficients.WithoutDraw(every), stream);
}

template <class Driver>
void SGHMCStep(TensorList params,
               TensorList grads,
               TensorList momenta,
               TensorList grad_variances,
               TensorList masters,
               double lr,
               double momentum,
               double num_data,
               double prior_precision,
               double temperature,
               double noise_estimate,
               int64_t resample_momentum_every,
               std::vector<int64_t> offsets,
               int64_t seed,
               int64_t step,
               std::optional<Tensor> device_step,
               double prior_mean,
               std::optional<TensorList> prior_means,
               Rows rows,
               int64_t num_chains) {
  constexpr const char* kOp = "sghmc_step_";
  const SGHMCCoefficients coefficients = CheckedSGHMC(kOp,
                                                      lr,
                                                      momentum,
                                                      num_data,
                                                      prior_precision,
                                                      temperature,
                                                      noise_estimate,
                                                      resample_momentum_every,
                                                      prior_mean);
  // Up to rounding: momentum 0.9 and noise_estimate 0.1 are parts of 1.
  if (noise_estimate > 1 - momentum + 1e-12) {
    Fail(kOp,
         "Invalid noise_estimate: " + std::to_string(noise_estimate) +
             " (must not exceed the friction 1 - momentum = " +
             std::to_string(1 - momentum) + ")");
  }
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kUpdate);
  std::vector<Argument> arguments = {{"params", Role::kParameter, params},
                                     {"grads", Role::kGradient, grads},
                                     {"momenta", Role::kState, momenta}};
  const bool noise_aware = !grad_variances.empty();
  if (noise_aware) {
    arguments.push_back({"grad_variances", Role::kStatistic, grad_variances});
  }
  arguments.push_back(PriorMeans(prior_means));
  arguments.push_back({"masters", Role::kMaster, masters});
  Plan plan(kOp, arguments, offsets, /*num_chains=*/1, {rows, num_chains});
  Driver driver(kOp, plan, device_step);
  const auto update =
      noise_aware
          ? UpdateMomenta<SGHMCNoiseAwareUpdate, Driver, SGHMCCoefficients>
          : UpdateMomenta<SGHMCUpdate, Driver, SGHMCCoefficients>;
  update(driver,
         plan,
         coefficients,
         stream,
         coefficients.DrawStd(),
         resample_momentum_every);
  plan.Finish();
}

// The same with masses, and frictions and variances where the lists have any.
// What they make of the friction is for the caller to check.
template <class Driver>
void SGHMCByCoordinateStep(TensorList params,
                           TensorList grads,
                           TensorList momenta,
                           TensorList grad_variances,
                           TensorList masses,
                           TensorList frictions,
                           TensorList masters,
                           double lr,
                           double momentum,
                           double num_data,
                           double prior_precision,
                           double temperature,
                           double noise_estimate,
                           int64_t resample_momentum_every,
                           std::vector<int64_t> offsets,
                           int64_t seed,
                           int64_t step,
                           std::optional<Tensor> device_step,
                           double prior_mean,
                           std::optional<TensorList> prior_means,
                           Rows rows,
                           int64_t num_chains) {
  constexpr const char* kOp = "sghmc_by_coordinate_step_";
  const SGHMCCoefficients group = CheckedSGHMC(kOp,
                                               lr,
                                               momentum,
                                               num_data,
                                               prior_precision,
                                               temperature,
                                               noise_estimate,
                                               resample_momentum_every,
                                               prior_mean);
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kUpdate);
  const bool has_variance = !grad_variances.empty();
  // In the places of lists that there are not, and by their own name in errors.
  const Argument given{"masses", Role::kStatistic, masses};
  const auto if_any = [&](const char* name, const TensorList& tensors) {
    return tensors.empty() ? given : Argument{name, Role::kStatistic, tensors};
  };
  Plan plan(kOp,
            {{"params", Role::kParameter, params},
             {"grads", Role::kGradient, grads},
             {"momenta", Role::kState, momenta},
             if_any("grad_variances", grad_variances),
             given,
             if_any("frictions", frictions),
             PriorMeans(prior_means),
             {"masters", Role::kMaster, masters}},
            offsets,
            /*num_chains=*/1,
            {rows, num_chains});
  Driver driver(kOp, plan, device_step);
  UpdateMomenta<SGHMCByCoordinateUpdate>(
      driver,
      plan,
      SGHMCByCoordinateCoefficients{group, has_variance},
      stream,
      /*draw_std=*/1,
      resample_momentum_every);
  plan.Finish();
}

template <class Driver>
void GradientVarianceStep(TensorList grads,
                          TensorList variances,
                          TensorList previous,
                          double weight) {
  constexpr const char* kOp = "gradient_variance_";
  CheckNumber(kOp, "weight", weight);
  Plan plan(kOp,
            {{"grads", Role::kGradient, grads},
             {"variances", Role::kState, variances},
             {"previous", Role::kState, previous}},
            std::vector<int64_t>(grads.size(), 0));
  Driver driver(kOp, plan, std::nullopt);
  driver.template Apply<GradientVarianceUpdate>(
      GradientVarianceCoefficients{weight}, NoiseStream{0, 0, 0});
  plan.Finish();
}

}  // namespace torch_sgmcmc
