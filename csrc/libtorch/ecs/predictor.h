// The linear predictor of a model, found in the graph of its log-likelihoods:
// torch_sgmcmc/ecs/predictor.py in C++, with which go its notes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_sgmcmc {

// A predictor, the log-likelihoods' derivatives by it, and its by the
// parameters.
struct Predictor {
  int64_t gate;       // its place among the gates: what all paths lead through
  at::Tensor first;   // [M], dl_i / deta_i
  at::Tensor second;  // [M], d²l_i / deta_i²
  at::Tensor rows;    // [M, d], x_i: not to be written to

  // That of log-likelihoods [M], which have a graph; none if there is none. The
  // place is looked for if it is not given.
  static std::optional<Predictor> Of(const at::Tensor& values,
                                     const std::vector<at::Tensor>& params,
                                     std::optional<int64_t> gate);
};

}  // namespace torch_sgmcmc
