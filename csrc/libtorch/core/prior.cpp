#include "libtorch/core/prior.h"

#include <ATen/ATen.h>

#include <string>

#include "libtorch/core/checks.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {

std::vector<at::Tensor> CopiesOfMeans(const std::vector<at::Tensor>& means,
                                      const std::vector<at::Tensor>& params) {
  if (means.size() != params.size()) {
    Invalid("Invalid prior_mean: " + std::to_string(means.size()) +
            " tensors for a group of " + std::to_string(params.size()) +
            " parameters (must be one for each; of several groups each needs "
            "its own)");
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i < means.size(); ++i) {
    const at::Tensor& mean = means[i];
    const std::string which =
        "Invalid prior_mean: number " + std::to_string(i) + " ";
    if (!mean.defined()) Invalid(which + "is undefined");
    if (!mean.is_floating_point() || mean.layout() != at::kStrided) {
      Invalid(which + "is of " + DtypeName(mean.scalar_type()) +
              " and layout " + LayoutName(mean.layout()) +
              " (must be floating point, and torch::kStrided)");
    }
    if (mean.sizes() != params[i].sizes()) {
      Invalid(which + "has shape " + Shape(mean.sizes()) + " (must be " +
              Shape(params[i].sizes()) + ", that of its parameter)");
    }
    copies.push_back(ZeroState(params[i]).copy_(mean.detach()));
    if (!copies.back().isfinite().all().item<bool>()) {
      Invalid(which + "has elements that are not finite");
    }
  }
  return copies;
}

}  // namespace torch_sgmcmc
