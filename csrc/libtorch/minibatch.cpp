#include "torch_sgmcmc/minibatch.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <string>

#include "core/counter.h"
#include "host/minibatch.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

NoiseStream Stream(int64_t seed, int64_t step, Purpose purpose) {
  // A negative step becomes one that is too large, which is refused.
  return {static_cast<uint64_t>(seed),
          static_cast<uint64_t>(step),
          static_cast<uint32_t>(purpose)};
}

// (1 - n / N) / n, once the gradients are known to be of n examples.
double FactorOf(const std::vector<at::Tensor>& gradients,
                std::optional<int64_t> num_data) {
  for (const at::Tensor& each : gradients) {
    if (!each.defined() || each.dim() == 0) {
      Invalid(
          "Invalid gradients: undefined, or without a dimension of examples "
          "(must be [n, *shape] for each parameter)");
    }
  }
  if (gradients.empty()) Invalid("Invalid gradients: none");
  const int64_t n = gradients[0].size(0);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& each = gradients[i];
    if (each.size(0) == n && each.is_floating_point()) continue;
    Invalid("Invalid gradients: number " + std::to_string(i) + " is of " +
            DtypeName(each.scalar_type()) + " and shape " +
            Shape(each.sizes()) + " (must be floating point, of " +
            std::to_string(n) + " examples)");
  }
  if (n < 2) {
    Invalid("Invalid gradients: of " + std::to_string(n) +
            " examples (must be at least 2)");
  }
  const auto size = static_cast<double>(n);
  if (!num_data) return 1 / size;
  CheckInteger("num_data", *num_data, 1);
  if (*num_data < n) {
    Invalid("Invalid num_data: " + std::to_string(*num_data) +
            " (must be at least the " + std::to_string(n) + " examples)");
  }
  return (1 - size / static_cast<double>(*num_data)) / size;
}

}  // namespace

std::vector<int64_t> draw_minibatch(int64_t num_data,
                                    int64_t batch_size,
                                    int64_t seed,
                                    int64_t step,
                                    bool replacement,
                                    int64_t num_replicas,
                                    int64_t rank) {
  return DrawMinibatches(num_data,
                         batch_size,
                         /*count=*/1,
                         replacement,
                         Stream(seed, step, Purpose::kMinibatch),
                         {num_replicas, rank});
}

std::vector<int64_t> draw_stratified_minibatch(const std::vector<int64_t>& ends,
                                               int64_t batch_size,
                                               int64_t seed,
                                               int64_t step,
                                               int64_t num_replicas,
                                               int64_t rank) {
  return DrawStratifiedMinibatches(ends,
                                   batch_size,
                                   /*count=*/1,
                                   Stream(seed, step, Purpose::kStrata),
                                   {num_replicas, rank});
}

std::vector<at::Tensor> minibatch_variance(
    const std::vector<at::Tensor>& gradients, std::optional<int64_t> num_data) {
  const double factor = FactorOf(gradients, num_data);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> variances;
  variances.reserve(gradients.size());
  for (const at::Tensor& each : gradients) {
    variances.push_back(
        each.detach().to(at::kDouble).var(0, /*unbiased=*/true) * factor);
  }
  return variances;
}

at::Tensor minibatch_covariance(const std::vector<at::Tensor>& gradients,
                                std::optional<int64_t> num_data) {
  const double factor = FactorOf(gradients, num_data);
  const at::NoGradGuard no_grad;
  const int64_t n = gradients[0].size(0);
  std::vector<at::Tensor> columns;
  columns.reserve(gradients.size());
  for (const at::Tensor& each : gradients) {
    columns.push_back(each.detach().to(at::kDouble).reshape({n, -1}));
  }
  at::Tensor rows = at::cat(columns, 1);
  rows = rows - rows.mean(0);
  return at::matmul(rows.t(), rows) * (factor / static_cast<double>(n - 1));
}

}  // namespace torch_sgmcmc
