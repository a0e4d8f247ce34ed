// torch_sgmcmc::ewsg_log_ratio, ewsg_decide and ewsg_select_: what the
// operators have in common on all devices.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "host/index_chain.h"
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
                     int64_t num_chains) {
  constexpr const char* kOp = "ewsg_log_ratio";
  CheckTarget(kOp, lr, num_data, prior_precision, temperature);
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
  const Plan plan(
      kOp, arguments, std::vector<int64_t>(params.size(), 0), num_chains);
  const EWSGCoefficients c(lr,
                           momentum,
                           num_data,
                           prior_precision,
                           temperature,
                           static_cast<Surrogate>(surrogate));
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

// Checks the arguments of ewsg_decide.
inline NoiseStream EWSGDecisions(const Tensor& log_ratios,
                                 int64_t proposal,
                                 int64_t seed,
                                 int64_t step) {
  constexpr const char* kOp = "ewsg_decide";
  if (proposal < 0 || proposal >= kMaxProposals) {
    Fail(kOp,
         "Invalid proposal: " + std::to_string(proposal) +
             " (must be in [0, 2^24))");
  }
  if (log_ratios.scalar_type() != ScalarType::Double || log_ratios.dim() != 1 ||
      !log_ratios.is_contiguous()) {
    Fail(kOp, "log_ratios must be one contiguous row of float64");
  }
  return MakeStream(kOp, seed, step, Purpose::kIndexChain);
}

// Checks the arguments of ewsg_select_.
inline Plan EWSGSelection(const TensorList& grads,
                          const TensorList& proposals,
                          const Tensor& accepted) {
  constexpr const char* kOp = "ewsg_select_";
  if (accepted.scalar_type() != ScalarType::Bool || accepted.dim() != 1 ||
      !accepted.is_contiguous() || accepted.numel() == 0) {
    Fail(kOp, "accepted must be one contiguous row of bool");
  }
  Plan plan(kOp,
            {{"grads", Role::kParameter, grads},
             {"proposals", Role::kGradient, proposals}},
            std::vector<int64_t>(grads.size(), 0),
            accepted.numel());
  if (!grads.empty() && (accepted.is_cuda() != plan.on_cuda() ||
                         accepted.get_device_index() != plan.device_index())) {
    Fail(kOp, "accepted is on another device than the gradients");
  }
  return plan;
}

inline int64_t BytesOf(ScalarType type) {
  return type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2;
}

}  // namespace torch_sgmcmc
