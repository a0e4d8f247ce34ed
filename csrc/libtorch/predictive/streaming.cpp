#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "torch_sgmcmc/predictive.h"

namespace torch_sgmcmc {
namespace {

[[noreturn]] void Refuse(const at::Tensor& outputs, const std::string& wanted) {
  std::ostringstream message;
  message << "Invalid outputs: shape " << outputs.sizes() << " (" << wanted
          << ")";
  throw std::invalid_argument(message.str());
}

double Tiniest(const at::Tensor& p) {
  return p.scalar_type() == at::kDouble ? std::numeric_limits<double>::min()
                                        : std::numeric_limits<float>::min();
}

// p log p, and 0 where p is.
at::Tensor Logarithms(const at::Tensor& p) {
  return p.clamp_min(Tiniest(p)).log_().mul_(p);
}

}  // namespace

at::Tensor Predictive::Values(const at::Tensor& outputs) const {
  if (link_ == Link::kIdentity) return outputs;
  if (link_ == Link::kSigmoid) return outputs.sigmoid();
  if (outputs.dim() < 2 || outputs.size(-1) < 2) {
    Refuse(outputs, "its last dimension must be that of two classes or more");
  }
  at::Tensor powers = (outputs - outputs.amax(-1, true)).exp_();
  return powers.div_(powers.sum(-1, true));
}

at::Tensor Predictive::Entropy(const at::Tensor& values) const {
  if (link_ == Link::kSigmoid) {
    return -Logarithms(values) - Logarithms(1 - values);
  }
  return -Logarithms(values).sum(-1);
}

void Predictive::update(const at::Tensor& outputs, double weight) {
  if (!std::isfinite(weight)) {
    throw std::invalid_argument("Invalid weight: " + std::to_string(weight) +
                                " (must be finite)");
  }
  if (!outputs.defined() || !outputs.is_floating_point()) {
    throw std::invalid_argument(
        "Invalid outputs: undefined, or no floating-point numbers");
  }
  if (outputs.dim() == 0) Refuse(outputs, "must have a row for each input");
  const at::NoGradGuard no_graph;
  const bool is_low = outputs.scalar_type() == at::kHalf ||
                      outputs.scalar_type() == at::kBFloat16;
  // So that log and softmax have the digits that the sums keep.
  const at::Tensor values =
      Values(is_low ? outputs.to(at::kFloat) : outputs.detach());
  if (count_ > 0 && values.sizes() != origin_.sizes()) {
    std::ostringstream wanted;
    wanted << "earlier draws gave " << origin_.sizes();
    Refuse(outputs, wanted.str());
  }
  const bool has_entropy = link_ != Link::kIdentity;
  if (count_ == 0) {
    origin_ = values.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
    distances_ = at::zeros_like(origin_);
    squares_ = at::zeros_like(origin_);
    dtype_ = values.scalar_type();
  }
  const at::Tensor distance = values - origin_;
  distances_.add_(distance, weight);
  squares_.addcmul_(distance, distance, weight);
  if (has_entropy) {
    const at::Tensor entropy = Entropy(values);
    if (count_ == 0) {
      entropies_ =
          at::zeros_like(entropy, entropy.options().dtype(at::kDouble));
    }
    entropies_.add_(entropy, weight);
  }
  ++count_;
  weights_ += weight;
  square_weights_ += weight * weight;
}

Prediction Predictive::result() const {
  if (count_ == 0) {
    throw std::invalid_argument(
        "There is nothing to predict with: no draw was added");
  }
  if (weights_ == 0) {
    throw std::invalid_argument("Invalid weights: they sum to 0");
  }
  Prediction result;
  const at::Tensor shift = distances_ / weights_;
  const at::Tensor mean = origin_ + shift;
  result.mean = mean.to(dtype_);
  result.variance = (squares_ / weights_ - shift.square()).to(dtype_);
  if (link_ != Link::kIdentity) {
    const at::Tensor aleatoric = entropies_ / weights_;
    // There is none of negative probabilities, as signed draws may have.
    const at::Tensor total = Entropy(mean.masked_fill(mean < 0, std::nan("")));
    result.total = total.to(dtype_);
    result.aleatoric = aleatoric.to(dtype_);
    result.epistemic = (total - aleatoric).to(dtype_);
  }
  result.num_draws = count_;
  result.weight = weights_;
  result.effective_draws = weights_ * weights_ / square_weights_;
  return result;
}

}  // namespace torch_sgmcmc
