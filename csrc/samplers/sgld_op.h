// torch_sgmcmc::sgld_step_ for any device driver.
#pragma once

#include <optional>
#include <vector>

#include "apply/plan.h"
#include "samplers/sgld.h"

namespace torch_sgmcmc {

template <class Driver>
void SGLDStep(TensorList params,
              TensorList grads,
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
  constexpr const char* kOp = "sgld_step_";
  CheckTarget(kOp, lr, num_data, prior_precision, temperature, prior_mean);
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kUpdate);
  Plan plan(kOp,
            {{"params", Role::kParameter, params},
             {"grads", Role::kGradient, grads},
             PriorMeans(prior_means),
             {"masters", Role::kMaster, masters}},
            offsets,
            /*num_chains=*/1,
            {rows, num_chains});
  Driver driver(kOp, plan, device_step);
  driver.template Apply<SGLDUpdate>(
      SGLDCoefficients(lr, num_data, prior_precision, temperature, prior_mean),
      stream);
  plan.Finish();
}

}  // namespace torch_sgmcmc
