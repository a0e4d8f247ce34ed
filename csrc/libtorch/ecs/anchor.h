// θ* of HMC-ECS: where it is, the sums around it, and the mass that goes with
// them. torch_sgmcmc/ecs/anchor.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "libtorch/ecs/prior.h"
#include "libtorch/ecs/taylor.h"
#include "torch_sgmcmc/hmcecs.h"

namespace torch_sgmcmc {

// All log-likelihoods, chunk by chunk.
struct AllData {
  const DataClosure& closure;  // must outlive it
  std::vector<at::Tensor> params;
  int64_t num_data;
  int64_t chunk_size;
  int64_t seed;
  ProgressHook progress;

  // The indices of each chunk; an undefined tensor is the end.
  std::function<at::Tensor()> chunks(const char* what) const;
  // Their sum, at the parameters as they are.
  at::Tensor log_likelihood() const;
  // Two random directions, as the parameters' type rounds them.
  at::Tensor probes(const at::Tensor& like) const;
};

// The control variates of a sampler.
struct ECSAnchor {
  at::Tensor theta;  // [d], in float64
  int64_t num_data = 0;
  TaylorSums sums;       // without a Hessian in expansions of first order
  at::Tensor whitening;  // see csrc/libtorch/ecs/whitening.h

  // With theta* there, by a pass through all data. The options say which
  // expansions, which mass, and the temperature.
  static ECSAnchor Choose(const AllData& data,
                          const at::Tensor& theta,
                          const ECSPrior& prior,
                          const HMCECSOptions& options);
  // The expansions of the data with these indices.
  TaylorTerms expand(const AllData& data, const at::Tensor& indices) const;
  // Throws if the log posterior fell from theta* to theta as it falls to no
  // draw.
  void check_near(const at::Tensor& log_likelihood,
                  const at::Tensor& there,
                  const ECSPrior& prior,
                  double temperature) const;
};

}  // namespace torch_sgmcmc
