#include "libtorch/ecs/likelihood.h"

#include <ATen/ATen.h>

namespace torch_sgmcmc {
namespace {

LikelihoodEstimate Perturbed(const LikelihoodEstimator& sizes,
                             const at::Tensor& differences) {
  const double scale =
      sizes.num_data / static_cast<double>(differences.numel());
  const at::Tensor total = differences.sum() * scale;
  const at::Tensor centred = differences - differences.mean();
  const at::Tensor variance = at::dot(centred, centred) * (scale * scale);
  // d(s^2 / 2) / d d_i is scale^2 (d_i - mean): the mean's part adds up to 0.
  const at::Tensor weights = at::rsub(centred * (scale * scale), scale);
  return {total - variance / 2, weights, 1, variance, total};
}

LikelihoodEstimate BlockPoisson(const LikelihoodEstimator& sizes,
                                const at::Tensor& differences) {
  const double scale = sizes.num_data / static_cast<double>(sizes.batch_size);
  const auto products = static_cast<double>(sizes.num_products);
  const at::Tensor estimates =
      differences.view({-1, sizes.batch_size}).sum(1) * scale;
  const at::Tensor excess = estimates - sizes.lower_bound;
  const at::Tensor logs = (excess / products).abs().log();
  const at::Tensor log = logs.sum() + (sizes.lower_bound + products);
  const at::Tensor weights =
      (excess.reciprocal() * scale).repeat_interleave(sizes.batch_size);
  const auto negative = (excess < 0).sum().item<int64_t>();
  // log is a sum over Poisson(lambda) minibatches, so that its variance is
  // lambda E[log^2].
  const at::Tensor variance = at::dot(logs, logs);
  const at::Tensor mean =
      estimates.numel() > 0 ? estimates.mean() : at::zeros_like(log);
  return {log, weights, negative % 2 == 1 ? -1 : 1, variance, mean};
}

}  // namespace

LikelihoodEstimate EstimateLikelihood(const LikelihoodEstimator& sizes,
                                      const at::Tensor& differences) {
  return sizes.num_products == 0 ? Perturbed(sizes, differences)
                                 : BlockPoisson(sizes, differences);
}

}  // namespace torch_sgmcmc
