// Log-likelihoods of some data, with a graph of their gradients.
//
// With weights w, one for each datum, s(w) = sum w_i grad l_i is a backward
// pass; it is linear in w, so that differentiating it by w gives all gradients,
// and doing the same to a directional derivative gives all H_i z.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/taylor.h"

namespace torch_sgmcmc {

class LikelihoodGraph {
 public:
  // The parameters must outlive it.
  LikelihoodGraph(const DataClosure& closure,
                  const std::vector<at::Tensor>& params,
                  const at::Tensor& indices);

  const at::Tensor& values() const { return values_; }     // l_i: [M]
  const at::Tensor& slope() const { return slope_; }       // sum grad l_i: [d]
  at::Tensor gradients() const;                            // [M, d]
  at::Tensor hessian() const;                              // sum H_i: [d, d]
  at::Tensor hessian_products(const at::Tensor& z) const;  // H_i z: [M, d]
  at::Tensor curvatures(const at::Tensor& z) const;        // z' H_i z: [M]

 private:
  // A function of weights that is linear in them, at weights of 1.
  struct Linear {
    at::Tensor value;  // undefined if it is 0
    at::Tensor weights;
  };
  // sum w_i H_i z.
  Linear bent(const at::Tensor& z) const;
  at::Tensor flat_gradient(const at::Tensor& outputs,
                           const at::Tensor& weights) const;

  const std::vector<at::Tensor>& params_;
  at::Tensor values_;
  at::Tensor weights_;
  at::Tensor slope_;
};

}  // namespace torch_sgmcmc
