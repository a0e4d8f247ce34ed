#include "libtorch/tensor_lists.h"

#include <ATen/ATen.h>

#include <atomic>
#include <cmath>
#include <string>

#include "libtorch/checks.h"
#include "libtorch/operators.h"
#include "random/counter.h"

namespace torch_sgmcmc {

NoiseKey KeyOf(const TensorLists& lists) {
  NoiseKey key{lists.offsets, lists.seed};
  key.num_chains = lists.num_chains;
  if (lists.gate.defined()) {
    key.device_step = lists.gate;
    return key;
  }
  key.step = lists.step.host;
  if (lists.step.is_on_device()) key.device_step = lists.step.device;
  return key;
}

at::ScalarType StateDtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor ZeroState(const at::Tensor& param) {
  return at::zeros_like(param, at::TensorOptions(StateDtype(param)));
}

bool HasMaster(const at::Tensor& param) {
  return param.scalar_type() == at::kBFloat16 ||
         param.scalar_type() == at::kHalf;
}

void StartState(const TensorLists& lists,
                const std::vector<at::Tensor*>& tensors, Start how) {
  std::vector<at::Tensor> fresh;
  std::vector<size_t> places;
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i]->defined()) continue;
    fresh.push_back(ZeroState(lists.params[i]));
    places.push_back(i);
    offsets.push_back(lists.offsets[i]);
  }
  if (fresh.empty()) return;
  if (how == Start::kStationary) {
    const OptionValues& options = *lists.options;
    NoiseKey key = KeyOf(lists);
    key.offsets = offsets;
    gaussian_(
        fresh,
        // The update scales all momenta or none.
        std::sqrt(options.lr() * options.temperature() / options.num_data()) /
            lists.momentum_scale,
        key.offsets, key.seed, key.step,
        static_cast<int64_t>(Purpose::kMomentum), key.device_step,
        /*rows=*/std::nullopt, key.num_chains);
  }
  for (size_t i = 0; i < places.size(); ++i) *tensors[places[i]] = fresh[i];
}

std::vector<at::Tensor> CopiesOfMeans(const std::vector<at::Tensor>& means,
                                      const std::vector<at::Tensor>& params) {
  if (means.size() != params.size()) {
    Invalid("Invalid prior_mean: ", means.size(), " tensors for a group of ",
            params.size(),
            " parameters (must be one for each; of several groups each needs "
            "its own)");
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i < means.size(); ++i) {
    const at::Tensor& mean = means[i];
    const std::string which =
        "Invalid prior_mean: number " + std::to_string(i) + " ";
    if (!mean.defined()) Invalid(which, "is undefined");
    if (!mean.is_floating_point() || mean.layout() != at::kStrided) {
      Invalid(which, "is of ", DtypeName(mean.scalar_type()), " and layout ",
              LayoutName(mean.layout()),
              " (must be floating point, and torch::kStrided)");
    }
    if (mean.sizes() != params[i].sizes()) {
      Invalid(which, "has shape ", Shape(mean.sizes()), " (must be ",
              Shape(params[i].sizes()), ", its parameter's shape)");
    }
    copies.push_back(ZeroState(params[i]).copy_(mean.detach()));
    if (!copies.back().isfinite().all().item<bool>()) {
      Invalid(which, "has elements that are not finite");
    }
  }
  return copies;
}

int64_t VersionOf(const at::Tensor& tensor) {
  static std::atomic<int64_t> unknown = 0;
  return tensor.is_inference() ? --unknown
                               : static_cast<int64_t>(tensor._version());
}

void BumpVersions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace torch_sgmcmc
