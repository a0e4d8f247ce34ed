#include "libtorch/ecs/target.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <optional>
#include <utility>

#include "libtorch/core/operators.h"

namespace torch_sgmcmc {
namespace {

at::Tensor Doubles(const at::Tensor& values) {
  return values.detach().to(at::kDouble).contiguous();
}

std::optional<at::Tensor> IfDefined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

ECSTarget::ECSTarget(DataClosure closure,
                     std::vector<at::Tensor> params,
                     std::shared_ptr<const ECSAnchor> anchor,
                     ECSPrior prior,
                     double temperature,
                     const ECSEstimator& estimator,
                     at::Tensor importance)
    : closure_(std::move(closure)),
      params_(std::move(params)),
      anchor_(std::move(anchor)),
      prior_(std::move(prior)),
      temperature_(temperature),
      estimator_(estimator),
      importance_(std::move(importance)) {}

std::shared_ptr<const ECSPoint> ECSTarget::evaluate(
    const std::shared_ptr<const ExpandedSubsample>& subsample,
    const at::Tensor& wanted) {
  const at::Tensor theta = place(wanted);
  evaluations_ += subsample->indices.numel();
  at::Tensor values;
  // The closure need not know how to do nothing.
  if (subsample->indices.numel() > 0) {
    const at::AutoGradMode enable_grad(true);
    values = LogLikelihoods(closure_, subsample->indices);
  }
  at::Tensor factors;
  if (importance_.defined()) {
    factors = importance_.index_select(0, subsample->indices);
  }
  ECSPoint point = theta.is_cpu()
                       ? fused(subsample->terms, factors, theta, values)
                       : composed(subsample->terms, factors, theta, values);
  point.theta = theta;
  point.subsample = subsample;
  return std::make_shared<const ECSPoint>(std::move(point));
}

// sum w_i grad l_i, in float64.
at::Tensor ECSTarget::pull(const at::Tensor& values,
                           const at::Tensor& weights) const {
  if (!values.defined()) return at::zeros_like(anchor_->theta);
  std::vector<at::Tensor> grads =
      torch::autograd::grad({values},
                            params_,
                            {weights.to(values.scalar_type())},
                            /*retain_graph=*/std::nullopt,
                            /*create_graph=*/false,
                            /*allow_unused=*/true);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) grads[i] = at::zeros_like(params_[i].detach());
  }
  return FlatRow(grads).to(at::kDouble);
}

// By two operators: what is not the closure's is then hardly seen.
ECSPoint ECSTarget::fused(const TaylorTerms& terms,
                          const at::Tensor& factors,
                          const at::Tensor& theta,
                          const at::Tensor& values) const {
  const TaylorSums& of_all = anchor_->sums;
  const auto scales = IfDefined(terms.scales);
  const auto hessians = IfDefined(terms.hessians);
  const auto [weights, bends, estimate] =
      ecs_estimate(values.defined() ? Doubles(values) : terms.values,
                   theta,
                   anchor_->theta,
                   terms.values,
                   terms.slopes,
                   scales,
                   hessians,
                   temperature_,
                   estimator_.num_data,
                   estimator_.batch_size,
                   estimator_.num_products,
                   estimator_.lower_bound,
                   IfDefined(factors));
  const auto [density, gradient] = ecs_density(estimate,
                                               pull(values, weights),
                                               weights,
                                               bends,
                                               theta,
                                               anchor_->theta,
                                               terms.slopes,
                                               scales,
                                               hessians,
                                               of_all.value,
                                               of_all.gradient,
                                               IfDefined(of_all.hessian),
                                               prior_.precision,
                                               temperature_,
                                               prior_.mean);
  const auto* number = estimate.const_data_ptr<double>();
  const auto* total = density.const_data_ptr<double>();
  ECSPoint point;
  point.log = total[0];
  point.gradient = gradient;
  point.finite = total[1] != 0;
  point.variance = number[1];
  point.mean = number[2];
  point.sign = number[3] < 0 ? -1 : 1;
  point.lowest = number[4];
  return point;
}

// The same in torch's own operations, for other devices.
ECSPoint ECSTarget::composed(const TaylorTerms& terms,
                             const at::Tensor& factors,
                             const at::Tensor& theta,
                             const at::Tensor& values) const {
  const at::Tensor delta = theta - anchor_->theta;
  const auto [expansions, bends] = terms.expand(delta);
  const at::Tensor differences =
      values.defined() ? Doubles(values) - expansions : expansions;
  const at::Tensor on_host = (differences / temperature_).cpu().contiguous();
  const at::Tensor weights_on_host = at::empty_like(on_host);
  at::Tensor factors_on_host;
  if (factors.defined()) factors_on_host = factors.cpu().contiguous();
  const ECSEstimate estimate = EstimateLikelihood(
      estimator_,
      on_host.mutable_data_ptr<double>(),
      factors.defined() ? factors_on_host.const_data_ptr<double>() : nullptr,
      on_host.numel(),
      weights_on_host.mutable_data_ptr<double>());
  const at::Tensor weights = weights_on_host.to(theta.device());
  const at::Tensor slope_of_subsample =
      pull(values, weights) - terms.pull(weights, bends);
  const TaylorSums& sums = anchor_->sums;
  at::Tensor total = sums.value;
  at::Tensor slope = sums.gradient;
  if (sums.hessian.defined()) {
    const at::Tensor bend = at::mv(sums.hessian, delta);
    total = total + at::dot(delta, slope + bend * 0.5);
    slope = slope + bend;
  } else {
    total = total + at::dot(delta, slope);
  }
  const at::Tensor log =
      (total - prior_.energy(theta)) / temperature_ + estimate.log;
  ECSPoint point;
  point.gradient =
      (slope_of_subsample + slope - prior_.slope(theta)) / temperature_;
  const at::Tensor finite = point.gradient.isfinite().all();
  const at::Tensor numbers =  // one wait for the device
      at::stack({log, finite.to(at::kDouble)}).cpu();
  const auto* number = numbers.const_data_ptr<double>();
  point.log = number[0];
  point.finite = number[1] != 0 && std::isfinite(number[0]);
  point.variance = estimate.variance;
  point.mean = estimate.mean;
  point.sign = estimate.sign < 0 ? -1 : 1;
  point.lowest = estimate.lowest;
  return point;
}

// Writes theta into the parameters; returns it as they round it, in float64.
at::Tensor ECSTarget::place(const at::Tensor& theta) const {
  int64_t start = 0;
  bool exact = true;
  for (const at::Tensor& param : params_) {
    const at::Tensor part = theta.slice(0, start, start + param.numel());
    param.copy_(part.view_as(param));
    start += param.numel();
    exact = exact && param.scalar_type() == at::kDouble;
  }
  return exact ? theta : FlatRow(params_).to(at::kDouble);
}

}  // namespace torch_sgmcmc
