// The linear predictor of a model, found in the graph of its log-likelihoods:
// torch_sgmcmc/_predictor.py in C++, with which go its notes.
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
  at::Tensor slope;   // [d], sum grad l_i, as a function of
  at::Tensor cotangents;  // the first derivatives, in the predictor's shape

  // That of log-likelihoods [M], which have a graph; none if there is none. The
  // place is looked for if it is not given.
  static std::optional<Predictor> Of(const at::Tensor& values,
                                     const std::vector<at::Tensor>& params,
                                     std::optional<int64_t> gate);

  // Its derivatives x_i by the parameters, [d, M], in `out` if that fits.
  at::Tensor columns(const at::Tensor& out = {}) const;
};

}  // namespace torch_sgmcmc
