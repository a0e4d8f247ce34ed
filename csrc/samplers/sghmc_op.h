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
  CheckTarget(kOp, lr, num_data, prior_precision, temperature, prior_mean);
  if (!(momentum >= 0 && momentum < 1)) {
    Fail(kOp,
         "Invalid momentum: " + std::to_string(momentum) +
             " (must be in [0, 1))");
  }
  CheckNumber(kOp, "noise_estimate", noise_estimate);
  // Up to rounding: momentum 0.9 and noise_estimate 0.1 are parts of 1.
  if (noise_estimate > 1 - momentum + 1e-12) {
    Fail(kOp,
         "Invalid noise_estimate: " + std::to_string(noise_estimate) +
             " (must not exceed the friction 1 - momentum = " +
             std::to_string(1 - momentum) + ")");
  }
  if (resample_momentum_every < 0) {
    Fail(kOp,
         "Invalid resample_momentum_every: " +
             std::to_string(resample_momentum_every) + " (must be >= 0)");
  }
  const SGHMCCoefficients coefficients(lr,
                                       momentum,
                                       num_data,
                                       prior_precision,
                                       temperature,
                                       noise_estimate,
                                       prior_mean);
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
  const auto update = [&](const SGHMCCoefficients& c) {
    if (noise_aware) {
      driver.template Apply<SGHMCNoiseAwareUpdate>(c, stream);
    } else {
      driver.template Apply<SGHMCUpdate>(c, stream);
    }
  };
  const int64_t every = resample_momentum_every;
  if (every == 0) {
    update(coefficients);
  } else {
    driver.template Apply<GaussianFill>(
        GaussianCoefficients{coefficients.DrawStd(), {every, true}},
        MakeStream(kOp, seed, step, Purpose::kMomentum),
        plan.ArithmeticArgument(2));
    update(coefficients.AfterDraw(every));
    update(coefficients.WithoutDraw(every));
  }
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
