#include "libtorch/core/closures.h"

#include <ATen/core/grad_mode.h>

#include <string>
#include <utility>

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

Exchanged::Exchanged(std::vector<at::Tensor> params,
                     const std::vector<at::Tensor>& values)
    : params_(std::move(params)) {
  own_.reserve(params_.size());
  for (const at::Tensor& param : params_) {
    own_.push_back(param.variable_data());
  }
  for (size_t i = 0; i < params_.size(); ++i) params_[i].set_data(values[i]);
}

Exchanged::~Exchanged() {
  for (size_t i = 0; i < params_.size(); ++i) params_[i].set_data(own_[i]);
}

}  // namespace torch_sgmcmc
