// How good a matrix of predictive probabilities is.
#pragma once

#include <ATen/core/Tensor.h>

namespace bnn {

struct Scores {
  /// Error rate.
  double error = 0;
  /// Mean negative log-likelihood of a label, in nats.
  double nll = 0;
  /// Expected calibration error, with 15 bins.
  double ece = 0;
};

Scores Evaluate(const at::Tensor& probabilities, const at::Tensor& labels);

}  // namespace bnn
