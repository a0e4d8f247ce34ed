// The log density that HMC-ECS follows: an estimate from one subsample.
// torch_sgmcmc/ecs/target.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "host/ecs_estimate.h"
#include "libtorch/ecs/anchor.h"
#include "libtorch/ecs/prior.h"
#include "libtorch/ecs/subsample.h"
#include "libtorch/ecs/taylor.h"

namespace torch_sgmcmc {

// The estimated log density and its gradient, at theta and for one subsample.
struct ECSPoint {
  at::Tensor theta;  // [d], in float64
  std::shared_ptr<const ExpandedSubsample> subsample;
  double log = 0;
  at::Tensor gradient;  // [d], float64
  bool finite = false;  // the log density and all of its gradient
  // Of the likelihood's estimate: see csrc/host/ecs_estimate.h.
  double variance = 0;
  double mean = 0;
  int64_t sign = 1;
  double lowest = 0;
};

// log |L^(theta, u)^(1/T)| + log prior / T, for any theta and subsample u.
//
// The per-datum log-likelihoods are divided by T before anything is estimated
// from them, so that the estimators do for a tempered posterior what they do
// for T = 1.
class ECSTarget {
 public:
  ECSTarget(DataClosure closure,
            std::vector<at::Tensor> params,
            std::shared_ptr<const ECSAnchor> anchor,
            ECSPrior prior,
            double temperature,
            const ECSEstimator& estimator,
            at::Tensor importance = {});

  const DataClosure& closure() const { return closure_; }
  // Of single data, so far.
  int64_t evaluations() const { return evaluations_; }

  const ECSEstimator& estimator() const { return estimator_; }

  // Moves the parameters to theta and computes all there is to know there.
  std::shared_ptr<const ECSPoint> evaluate(
      const std::shared_ptr<const ExpandedSubsample>& subsample,
      const at::Tensor& wanted);

 private:
  at::Tensor place(const at::Tensor& theta) const;
  at::Tensor pull(const at::Tensor& values, const at::Tensor& weights) const;
  ECSPoint fused(const TaylorTerms& terms,
                 const at::Tensor& factors,
                 const at::Tensor& theta,
                 const at::Tensor& values) const;
  ECSPoint composed(const TaylorTerms& terms,
                    const at::Tensor& factors,
                    const at::Tensor& theta,
                    const at::Tensor& values) const;

  DataClosure closure_;
  std::vector<at::Tensor> params_;
  std::shared_ptr<const ECSAnchor> anchor_;
  ECSPrior prior_;
  double temperature_;
  ECSEstimator estimator_;
  at::Tensor importance_;  // [N], of data that are drawn by weights
  int64_t evaluations_ = 0;
};

}  // namespace torch_sgmcmc
