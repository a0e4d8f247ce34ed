#include "bnn/metrics.h"

#include <torch/types.h>

#include <tuple>

namespace bnn {

using torch::Tensor;

namespace {

constexpr int64_t kBins = 15;

// The mean absolute difference of confidence and accuracy, over bins of the
// confidence. The operations, in this order, are torchmetrics' own: any other
// order rounds differently.
double CalibrationError(const Tensor& probabilities, const Tensor& labels) {
  const auto [confidences, predictions] = probabilities.max(1);
  const Tensor correct = predictions.eq(labels).to(confidences.scalar_type());
  const auto options = confidences.options();
  const Tensor edges = torch::linspace(0, 1, kBins + 1, options);
  const Tensor bins =
      torch::bucketize(
          confidences, edges, /*out_int32=*/false, /*right=*/true) -
      1;
  // A confidence of 1 has a bin of its own.
  const auto sums = [&, which = bins](const Tensor& values) {
    return torch::zeros({kBins + 1}, options).scatter_add_(0, which, values);
  };
  const Tensor counts = sums(torch::ones_like(confidences));
  const Tensor confidence = torch::nan_to_num(sums(confidences) / counts);
  const Tensor accuracy = torch::nan_to_num(sums(correct) / counts);
  const Tensor weights = counts / counts.sum();
  return ((accuracy - confidence).abs() * weights).sum().item<double>();
}

}  // namespace

Scores Evaluate(const Tensor& probabilities, const Tensor& labels) {
  const Tensor picked =
      probabilities.gather(1, labels.unsqueeze(1)).clamp_min(1e-38);
  const Tensor wrong = probabilities.argmax(1).ne(labels);
  return {wrong.to(torch::kDouble).mean().item<double>(),
          -picked.to(torch::kDouble).log().mean().item<double>(),
          CalibrationError(probabilities, labels)};
}

}  // namespace bnn
