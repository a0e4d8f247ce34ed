#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "apply/reduce.cuh"

namespace torch_sgmcmc {
namespace {

Tensor SumOfSquares(TensorList tensors) {
  constexpr const char* kOp = "sum_of_squares";
  if (tensors.empty()) Fail(kOp, "tensors is empty");
  const Plan plan(kOp,
                  {{"tensors", Role::kGradient, tensors}},
                  std::vector<int64_t>(tensors.size(), 0));
  Tensor result = torch::stable::new_empty(tensors[0], {}, ScalarType::Double);
  ReduceOnCuda(plan, Square(), /*num_chains=*/1, result);
  return result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("sum_of_squares", TORCH_BOX(&torch_sgmcmc::SumOfSquares));
}
