// Log-likelihoods of some data, with a graph of their gradients.
//
// With weights w, one for each datum, s(w) = sum w_i grad l_i is a backward
// pass; it is linear in w, so that differentiating it by w gives all gradients,
// and doing the same to a directional derivative gives all H_i z.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "libtorch/ecs/taylor.h"

namespace torch_sgmcmc {

class LikelihoodGraph {
 public:
  // Of log-likelihoods [M], which have a graph. The parameters must outlive it.
  LikelihoodGraph(at::Tensor values, const std::vector<at::Tensor>& params);

  const at::Tensor& slope() const { return slope_; }       // sum grad l_i: [d]
  at::Tensor gradients() const;                            // [M, d]
  at::Tensor hessian() const;                              // sum H_i: [d, d]
  at::Tensor hessian_products(const at::Tensor& z) const;  // H_i z: [M, d]
  // grad l_i'z, with a graph: [M].
  at::Tensor along(const at::Tensor& z) const;
  at::Tensor curvatures(const at::Tensor& z) const;  // z' H_i z: [M]

 private:
  // A function of weights that is linear in them, at weights of 1.
  struct Linear {
    at::Tensor value;  // undefined if it is 0
    at::Tensor weights;
  };
  // sum w_i H_i z.
  Linear bent(const at::Tensor& z) const;

  const std::vector<at::Tensor>& params_;
  at::Tensor values_;
  at::Tensor weights_;
  at::Tensor slope_;
};

// Calls the closure, with gradients enabled, and checks what it returns.
at::Tensor ValuesWithGraph(const DataClosure& closure,
                           const at::Tensor& indices);

// The derivative of `pull` [d] by the M weights it is linear in: [d, M].
at::Tensor ColumnsOfLinear(const at::Tensor& pull, const at::Tensor& weights);

// The log-likelihoods of data [M] and each one's gradient [M, d], by a backward
// pass for each: for many parameters.
struct LikelihoodRows {
  at::Tensor values;
  at::Tensor gradients;
};
LikelihoodRows GradientsByData(const DataClosure& closure,
                               const std::vector<at::Tensor>& params,
                               const at::Tensor& indices);

}  // namespace torch_sgmcmc
