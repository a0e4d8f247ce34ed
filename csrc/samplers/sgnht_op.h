// torch_sgmcmc::sgnht_step_ for any device driver.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "samplers/sgnht.h"

namespace torch_sgmcmc {

template <class Driver>
void SGNHTStep(TensorList params,
               TensorList grads,
               TensorList momenta,
               TensorList thermostats,
               TensorList masters,
               double lr,
               double momentum,
               double num_data,
               double prior_precision,
               double temperature,
               double thermostat_rate,
               std::vector<int64_t> offsets,
               int64_t seed,
               int64_t step,
               std::optional<Tensor> device_step,
               double prior_mean,
               std::optional<TensorList> prior_means,
               Rows rows,
               int64_t num_chains) {
  constexpr const char* kOp = "sgnht_step_";
  CheckTarget(kOp, lr, num_data, prior_precision, temperature, prior_mean);
  if (!(momentum >= 0 && momentum < 1)) {
    Fail(kOp,
         "Invalid momentum: " + std::to_string(momentum) +
             " (must be in [0, 1))");
  }
  CheckNumber(kOp, "thermostat_rate", thermostat_rate);
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kUpdate);
  Plan plan(kOp,
            {{"params", Role::kParameter, params},
             {"grads", Role::kGradient, grads},
             {"momenta", Role::kState, momenta},
             {"thermostats", Role::kState, thermostats},
             PriorMeans(prior_means),
             {"masters", Role::kMaster, masters}},
            offsets,
            /*num_chains=*/1,
            {rows, num_chains});
  Driver driver(kOp, plan, device_step);
  driver.template Apply<SGNHTUpdate>(SGNHTCoefficients(lr,
                                                       momentum,
                                                       num_data,
                                                       prior_precision,
                                                       temperature,
                                                       thermostat_rate,
                                                       prior_mean),
                                     stream);
  plan.Finish();
}

}  // namespace torch_sgmcmc
