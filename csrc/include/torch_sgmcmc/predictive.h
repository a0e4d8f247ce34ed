// What the draws of a posterior predict together.
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

/// From a model's outputs to what is averaged over draws. Classes are the last
/// dimension.
enum class Link { kSoftmax, kSigmoid, kIdentity };

/// What weighted draws predict together for each of many inputs. All means over
/// draws are sums of w f over the sum of w. Weights of both signs, as of signed
/// draws, may leave a mean of probabilities outside of [0, 1] by its error
/// (`total` is NaN where one is negative) and a variance negative.
struct Prediction {
  /// [inputs, ...], of probabilities with a link to them, else of outputs.
  at::Tensor mean;
  /// Like `mean`, over draws: of the posterior, without the noise of data.
  at::Tensor variance;
  /// Entropy of the mean probabilities, in nats; undefined with kIdentity, as
  /// the next two.
  at::Tensor total;
  /// Mean of the draws' entropies, which no data will reduce.
  at::Tensor aleatoric;
  /// Their difference, the mutual information of label and parameters.
  at::Tensor epistemic;
  int64_t num_draws = 0;
  /// The sum of weights.
  double weight = 0;
  /// (sum of w)^2 / sum of w^2. That draws are correlated is not in it.
  double effective_draws = 0;
};

/// Adds up what draws give for the same inputs, in float64: memory does not
/// grow with their number. Outputs come from a model in eval mode; no graph
/// is kept. The same numbers as Python's Predictive.
class TORCH_SGMCMC_API Predictive {
 public:
  explicit Predictive(Link link = Link::kSoftmax) : link_(link) {}

  /// Adds a draw's outputs for all inputs, [inputs, ...]. Throws
  /// std::invalid_argument if their shape differs from the earlier draws' or
  /// the weight is not finite; nothing has been added.
  void update(const at::Tensor& outputs, double weight = 1);
  /// Throws std::invalid_argument if there is no draw, or weights sum to 0.
  Prediction result() const;
  /// The draws that have been added.
  int64_t num_draws() const { return static_cast<int64_t>(weights_.size()); }

  /// The sums so far, under the keys of Python's Predictive: either continues
  /// with the other's. Tensors are shared, not copied.
  StateDict state_dict() const;
  /// Goes on with the sums of another run, on a device. Throws
  /// std::invalid_argument if they do not come from a Predictive with this
  /// link, or have averages of functions or quantiles, which are Python's;
  /// nothing has been loaded.
  void load_state_dict(const StateDict& state, c10::Device device = c10::kCPU);

 private:
  at::Tensor Values(const at::Tensor& outputs) const;
  at::Tensor Entropy(const at::Tensor& values) const;

  Link link_;
  // Of values minus the first draw's: variances of numbers
  // far from 0 keep their digits.
  at::Tensor origin_;
  at::Tensor distances_;
  at::Tensor squares_;
  at::Tensor entropies_;
  c10::ScalarType dtype_ = c10::ScalarType::Float;
  std::vector<double> weights_;
};

}  // namespace torch_sgmcmc
