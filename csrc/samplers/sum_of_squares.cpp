#include <torch/csrc/stable/library.h>

#include "apply/reduce.h"

namespace torch_sgmcmc {
namespace {

Tensor SumOfSquares(TensorList tensors) {
  constexpr const char* kOp = "sum_of_squares";
  if (tensors.empty()) Fail(kOp, "tensors is empty");
  const Plan plan(kOp,
                  {{"tensors", Role::kGradient, tensors}},
                  std::vector<int64_t>(tensors.size(), 0));
  Tensor result = torch::stable::new_empty(tensors[0], {}, ScalarType::Double);
  ReduceOnCpu(plan.segments(),
              Square(),
              /*num_chains=*/1,
              static_cast<double*>(result.data_ptr()));
  return result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("sum_of_squares", TORCH_BOX(&torch_sgmcmc::SumOfSquares));
}
