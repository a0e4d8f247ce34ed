// torch_sgmcmc::gauge_sums for any device.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apply/plan.h"
#include "apply/reduce.h"
#include "samplers/gauge.h"

namespace torch_sgmcmc {

template <class Reducer, GaugeKind kKind>
Tensor GaugeSumsOf(const TensorList& grads,
                   const TensorList& positions,
                   const TensorList& centers,
                   const TensorList& movers,
                   const TensorList& statistics,
                   const std::optional<TensorList>& prior_means,
                   const GaugeNumbers& numbers) {
  using Map = GaugeTerms<kKind>;
  constexpr const char* kOp = "gauge_sums";
  const auto or_else = [](const TensorList& list,
                          const TensorList& other) -> const TensorList& {
    return list.empty() ? other : list;
  };
  const auto& any_mover = Map::kOfNoise ? grads : positions;
  const Plan plan(
      kOp,
      {{"grads", Role::kGradient, grads},
       {"positions", Role::kStatistic, positions},
       {"centers", Role::kStatistic, or_else(centers, positions)},
       {"movers",
        Map::kRoles[3],
        Map::kReads[3] ? movers : or_else(movers, any_mover)},
       {"statistics",
        Role::kStatistic,
        Map::kReads[4] ? statistics : or_else(statistics, positions)},
       PriorMeans(prior_means)},
      std::vector<int64_t>(grads.size(), 0));
  // A plan leaves empty tensors out.
  std::vector<int64_t> rows;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].numel() > 0) rows.push_back(static_cast<int64_t>(i));
  }
  Tensor result =
      torch::stable::new_zeros(grads[0],
                               {static_cast<int64_t>(grads.size()),
                                static_cast<int64_t>(CountOf(kKind))},
                               ScalarType::Double);
  Reducer::ReduceEach(plan, Map(numbers), rows, result);
  return result;
}

template <class Reducer>
Tensor GaugeSumsOfAnyKind(TensorList grads,
                          TensorList positions,
                          TensorList centers,
                          TensorList movers,
                          TensorList statistics,
                          int64_t kind,
                          double weight_decay,
                          double decay,
                          double eps,
                          double prior_mean,
                          std::optional<TensorList> prior_means) {
  constexpr const char* kOp = "gauge_sums";
  if (grads.empty()) Fail(kOp, "grads is empty");
  CheckNumber(kOp, "weight_decay", weight_decay);
  CheckNumber(kOp, "eps", eps);
  CheckFinite(kOp, "prior_mean", prior_mean);
  if (!(decay >= 0 && decay <= 1)) {
    Fail(kOp,
         "Invalid decay: " + std::to_string(decay) + " (must be in [0, 1])");
  }
  const GaugeNumbers numbers{
      weight_decay, centers.empty() ? 0.0 : 1.0, decay, eps, prior_mean};
  const auto of = [&](auto sums) {
    return sums(
        grads, positions, centers, movers, statistics, prior_means, numbers);
  };
  switch (static_cast<GaugeKind>(kind)) {
    case GaugeKind::kLangevin:
      return of(GaugeSumsOf<Reducer, GaugeKind::kLangevin>);
    case GaugeKind::kPreconditioned:
      return of(GaugeSumsOf<Reducer, GaugeKind::kPreconditioned>);
    case GaugeKind::kMomentum:
      return of(GaugeSumsOf<Reducer, GaugeKind::kMomentum>);
    case GaugeKind::kThermostat:
      return of(GaugeSumsOf<Reducer, GaugeKind::kThermostat>);
    case GaugeKind::kNoise:
      return of(GaugeSumsOf<Reducer, GaugeKind::kNoise>);
    case GaugeKind::kPreconditionedNoise:
      return of(GaugeSumsOf<Reducer, GaugeKind::kPreconditionedNoise>);
  }
  Fail(kOp, "Invalid kind: " + std::to_string(kind) + " (must be in [0, 5])");
}

}  // namespace torch_sgmcmc
