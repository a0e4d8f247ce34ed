// What gauges sum along one trajectory of HMC:
// torch_sgmcmc/chain/trajectory_heat.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "host/trajectory_heat.h"

namespace torch_sgmcmc {

// Some parameters on a trajectory, by lists.
struct Moving {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> positions;  // in the type of arithmetic
  std::vector<at::Tensor> momenta;
  std::vector<at::Tensor> masses;  // empty: all are 1
  double weight_decay = 0;
  double prior_mean = 0;
  std::vector<at::Tensor> prior_means;
};

// Weighted sums over the leapfrog steps.
class TrajectoryHeat {
 public:
  // The centers of parameters, or an empty list.
  using CentersOf = std::function<std::vector<at::Tensor>(
      const std::vector<at::Tensor>& params)>;

  explicit TrajectoryHeat(CentersOf centers_of)
      : centers_of_(std::move(centers_of)) {}

  // Adds force x . g to one sum, and heat r . M^-1 r + turn x . r to the other.
  void look(const std::vector<Moving>& moving, const HeatWeights& weights);

  // A row of both for each tensor of a list.
  at::Tensor sums(size_t index) const;

 private:
  CentersOf centers_of_;
  std::vector<at::Tensor> forces_;
  std::vector<at::Tensor> heats_;
};

}  // namespace torch_sgmcmc
