#include "libtorch/core/closures.h"

#include <ATen/core/grad_mode.h>

#include <string>

#include "libtorch/core/checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {

using torch::optim::OptimizerParamGroup;

torch::Tensor FreshGradients(
    std::vector<OptimizerParamGroup>& groups,
    const torch::optim::Optimizer::LossClosure& closure) {
  for (OptimizerParamGroup& group : groups) {
    for (at::Tensor& param : group.params()) param.mutable_grad().reset();
  }
  const at::AutoGradMode enable_grad(true);
  return closure();
}

bool SameParameters(const std::vector<Work>& first,
                    const std::vector<Work>& second) {
  bool same = first.size() == second.size();
  for (size_t i = 0; same && i < first.size(); ++i) {
    same = first[i].params.size() == second[i].params.size();
    for (size_t j = 0; same && j < first[i].params.size(); ++j) {
      same = first[i].params[j].is_same(second[i].params[j]);
    }
  }
  return same;
}

void CheckChains(const at::Tensor& param,
                 const std::optional<int64_t>& num_chains) {
  if (!num_chains) return;
  if (param.dim() == 0 || param.size(0) != *num_chains) {
    Invalid("Invalid parameter: shape " + Shape(param.sizes()) +
            " (must have a leading dimension of num_chains = " +
            std::to_string(*num_chains) + ")");
  }
}

}  // namespace torch_sgmcmc
