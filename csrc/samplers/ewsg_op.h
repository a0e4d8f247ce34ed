// torch_sgmcmc::ewsg_log_ratio: what it has in common on all devices.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "samplers/ewsg.h"

namespace torch_sgmcmc {

// torch_sgmcmc::ewsg_log_ratio, with a map that reads no more than it needs.
template <class Reducer>
Tensor EWSGLogRatios(TensorList params,
                     TensorList grads,
                     TensorList proposals,
                     TensorList momenta,
                     double lr,
                     double momentum,
                     double num_data,
                     double prior_precision,
                     double temperature,
                     int64_t surrogate,
                     int64_t num_chains,
                     double prior_mean,
                     std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "ewsg_log_ratio";
  CheckTarget(kOp, lr, num_data, prior_precision, temperature, prior_mean);
  CheckNumber(kOp, "temperature", temperature, /*positive=*/true);
  if (!(momentum >= 0 && momentum < 1)) {
    Fail(kOp,
         "Invalid momentum: " + std::to_string(momentum) +
             " (must be in [0, 1))");
  }
  if (surrogate < 0 || surrogate >= kSurrogates) {
    Fail(kOp,
         "Invalid surrogate: " + std::to_string(surrogate) +
             " (must be 0, 1, 2 or 3)");
  }
  if (num_chains < 1) {
    Fail(kOp,
         "Invalid num_chains: " + std::to_string(num_chains) +
             " (must be >= 1)");
  }
  if (params.empty()) Fail(kOp, "params is empty");
  std::vector<Argument> arguments = {{"params", Role::kGradient, params},
                                     {"grads", Role::kGradient, grads},
                                     {"proposals", Role::kGradient, proposals}};
  if (!momenta.empty()) {
    arguments.push_back({"momenta", Role::kStatistic, momenta});
  }
  arguments.push_back(PriorMeans(prior_means));
  const Plan plan(
      kOp, arguments, std::vector<int64_t>(params.size(), 0), num_chains);
  const EWSGCoefficients c(lr,
                           momentum,
                           num_data,
                           prior_precision,
                           temperature,
                           static_cast<Surrogate>(surrogate),
                           prior_mean);
  const bool has_prior = c.twice_decay != 0;
  const bool has_momentum = !momenta.empty() && c.twice_share != 0;
  Tensor result =
      torch::stable::new_empty(params[0], {num_chains}, ScalarType::Double);
  const auto reduce = [&](const auto& map) {
    Reducer::Reduce(plan, map, num_chains, result);
  };
  if (has_prior && has_momentum) {
    reduce(EWSGLogRatio<true, true>(c));
  } else if (has_prior) {
    reduce(EWSGLogRatio<true, false>(c));
  } else if (has_momentum) {
    reduce(EWSGLogRatio<false, true>(c));
  } else {
    reduce(EWSGLogRatio<false, false>(c));
  }
  return result;
}

}  // namespace torch_sgmcmc
