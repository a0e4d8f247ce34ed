// torch_sgmcmc::control_variate_ for any device driver.
#pragma once

#include <optional>
#include <vector>

#include "apply/plan.h"
#include "samplers/control_variate.h"

namespace torch_sgmcmc {

template <class Driver>
void ControlVariate(TensorList grads,
                    TensorList anchor_grads,
                    TensorList full_grads) {
  constexpr const char* kOp = "control_variate_";
  Plan plan(kOp,
            {{"grads", Role::kInPlace, grads},
             {"anchor_grads", Role::kGradient, anchor_grads},
             {"full_grads", Role::kStatistic, full_grads}},
            std::vector<int64_t>(grads.size(), 0));
  Driver driver(kOp, plan, std::nullopt);
  driver.template Apply<ControlVariateUpdate>(ControlVariateCoefficients{},
                                              NoiseStream{0, 0, 0});
  plan.Finish();
}

}  // namespace torch_sgmcmc
