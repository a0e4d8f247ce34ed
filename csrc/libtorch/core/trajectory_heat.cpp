#include "libtorch/core/trajectory_heat.h"

#include <ATen/ATen.h>

#include "libtorch/core/operators.h"
#include "libtorch/core/prior.h"
#include "methods/gauge.h"

namespace torch_sgmcmc {

// The same operations on tensors as in Python, for the same bits.
void TrajectoryHeat::look(const std::vector<Moving>& moving,
                          const HeatWeights& weights) {
  forces_.resize(moving.size());
  heats_.resize(moving.size());
  for (size_t i = 0; i < moving.size(); ++i) {
    const Moving& lists = moving[i];
    std::vector<at::Tensor> momenta = lists.momenta;
    if (weights.heat != 0) {
      for (size_t j = 0; j < lists.masses.size(); ++j) {
        momenta[j] = momenta[j] * lists.masses[j].rsqrt();
      }
    }
    const at::Tensor found =
        gauge_sums(lists.grads,
                   lists.positions,
                   centers_of_(lists.params),
                   momenta,
                   {},
                   static_cast<int64_t>(GaugeKind::kMomentum),
                   lists.weight_decay,
                   /*decay=*/1,
                   /*eps=*/0,
                   lists.prior_mean,
                   MeansOf(lists.prior_means));
    const auto add = [&](at::Tensor& total, double weight, int64_t column) {
      if (weight == 0) return;
      const at::Tensor part = found.select(1, column) * weight;
      total = total.defined() ? total + part : part;
    };
    add(forces_[i], weights.force, 0);
    add(heats_[i], weights.heat, 1);
    add(heats_[i], weights.turn, 2);
  }
}

at::Tensor TrajectoryHeat::sums(size_t index) const {
  return at::stack({forces_[index], heats_[index]}, /*dim=*/1);
}

}  // namespace torch_sgmcmc
