// Predictions from the draws of a posterior.
//
//   torch_sgmcmc::Predictive predictive;  // of class probabilities
//   for (const auto& draw : torch_sgmcmc::SampleStore("draws")) {
//     draw.copy_to(*net);
//     predictive.update(net->forward(x), draw.weight);
//   }
//   predictive.result().mean;
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

/// The function from outputs to the averaged values; classes come last.
enum class Link { kSoftmax, kSigmoid, kIdentity };

/// Predictions for each input; means over draws are Σ w f / Σ w. With weights
/// of both signs a mean of probabilities may be outside of [0, 1] by its error
/// (`total` is NaN where one is negative), and a variance negative.
struct Prediction {
  /// [inputs, ...], of probabilities, with kIdentity of outputs.
  at::Tensor mean;
  /// Like `mean`, the posterior variance over draws.
  at::Tensor variance;
  /// Entropy of the mean probabilities, in nats; these three are undefined with
  /// kIdentity.
  at::Tensor total;
  /// Mean of the draws' entropies, which no data reduces.
  at::Tensor aleatoric;
  /// total - aleatoric, the mutual information of label and parameters.
  at::Tensor epistemic;
  int64_t num_draws = 0;
  /// The sum of weights.
  double weight = 0;
  /// (Σ w)² / Σ w², which ignores correlation between draws.
  double effective_draws = 0;
};

/// Sums over draws in float64, in memory that does not grow with their number.
/// Evaluate the model in eval mode. The numbers are Python's Predictive's.
class TORCH_SGMCMC_API Predictive {
 public:
  explicit Predictive(Link link = Link::kSoftmax) : link_(link) {}

  /// Adds a draw's outputs for all inputs, [inputs, ...]. Throws
  /// std::invalid_argument, and adds nothing, if their shape differs from
  /// earlier draws' or the weight is not finite.
  void update(const at::Tensor& outputs, double weight = 1);
  /// Throws std::invalid_argument if there is no draw, or weights sum to 0.
  Prediction result() const;
  /// The number of added draws.
  int64_t num_draws() const { return static_cast<int64_t>(weights_.size()); }

  /// The sums so far, as in Python. Tensors are shared, not copied.
  StateDict state_dict() const;
  /// Continues with the sums of another run. Throws std::invalid_argument, and
  /// loads nothing, if they are of another link, or have averages of functions
  /// or quantiles.
  void load_state_dict(const StateDict& state, c10::Device device = c10::kCPU);

 private:
  at::Tensor Values(const at::Tensor& outputs) const;
  at::Tensor Entropy(const at::Tensor& values) const;

  Link link_;
  // Sums of distances from the first draw's values keep more digits.
  at::Tensor origin_;
  at::Tensor distances_;
  at::Tensor squares_;
  at::Tensor entropies_;
  c10::ScalarType dtype_ = c10::ScalarType::Float;
  std::vector<double> weights_;
};

}  // namespace torch_sgmcmc
