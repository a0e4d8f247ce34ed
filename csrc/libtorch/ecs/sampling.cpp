#include "libtorch/ecs/sampling.h"

#include <ATen/ATen.h>

#include <string>

#include "libtorch/core/checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {

std::shared_ptr<const ECSSampling> ECSSampling::Of(const at::Tensor& weights) {
  const at::Tensor on_host = weights.cpu().contiguous();
  const auto law = std::make_shared<const SamplingWeights>(
      on_host.const_data_ptr<double>(), on_host.numel());
  return std::make_shared<const ECSSampling>(
      ECSSampling{weights, law, weights.reciprocal() * law->mean()});
}

std::shared_ptr<const ECSSampling> ECSSampling::Given(const at::Tensor& weights,
                                                      int64_t num_data,
                                                      c10::Device device) {
  if (!weights.defined() || weights.is_complex()) {
    Invalid("Invalid sampling_weights: got " +
            (weights.defined() ? DtypeName(weights.scalar_type())
                               : std::string("an undefined tensor")) +
            " (must be a tensor of real numbers, or std::nullopt)");
  }
  const std::vector<int64_t> shape = {num_data};
  if (weights.sizes() != c10::IntArrayRef(shape)) {
    Invalid("Invalid sampling_weights: shape " + Shape(weights.sizes()) +
            " (must be " + Shape(shape) + ", one for each datum)");
  }
  return Of(weights.detach()
                .to(at::TensorOptions(at::kDouble).device(device),
                    /*non_blocking=*/false,
                    /*copy=*/true)
                .contiguous());
}

}  // namespace torch_sgmcmc
