// torch_sgmcmc::sum_of_squares for any device.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <vector>

#include "apply/plan.h"
#include "apply/reduce.h"

namespace torch_sgmcmc {

template <class Reducer>
Tensor SumOfSquares(TensorList tensors) {
  constexpr const char* kOp = "sum_of_squares";
  if (tensors.empty()) Fail(kOp, "tensors is empty");
  const Plan plan(kOp,
                  {{"tensors", Role::kGradient, tensors}},
                  std::vector<int64_t>(tensors.size(), 0));
  Tensor result = torch::stable::new_empty(tensors[0], {}, ScalarType::Double);
  Reducer::Reduce(plan, Square(), /*num_chains=*/1, result);
  return result;
}

}  // namespace torch_sgmcmc
