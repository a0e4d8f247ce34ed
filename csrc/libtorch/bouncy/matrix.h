// The matrix that users give SBPS as its preconditioner:
// torch_sgmcmc/bouncy/matrix.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

// An invertible A of all coordinates, times lists of tensors that hold them.
// Products are sums along rows in float64, which do not depend on threads.
class FlightMatrix {
 public:
  // What comes out has the shapes, layouts and types of `like`.
  FlightMatrix(const at::Tensor& a, std::vector<at::Tensor> like);

  // A v, A' g and the inverse times x.
  std::vector<at::Tensor> times(const std::vector<at::Tensor>& v) const;
  std::vector<at::Tensor> transposed_times(
      const std::vector<at::Tensor>& g) const;
  std::vector<at::Tensor> solved(const std::vector<at::Tensor>& x) const;

 private:
  std::vector<at::Tensor> product(const at::Tensor& a,
                                  const std::vector<at::Tensor>& with) const;

  at::Tensor a_;
  at::Tensor transposed_;
  mutable at::Tensor inverse_;  // once it is asked for
  std::vector<at::Tensor> like_;
};

// The matrix as it is kept: a copy, in float64, where the parameters are.
// Throws unless it is finite, invertible and of as many rows and columns as
// they have elements, and they are on one device and require gradients.
at::Tensor CheckedMatrix(const at::Tensor& value,
                         const std::vector<at::Tensor>& params);

// That of a state dict, of d coordinates, on a device.
at::Tensor SavedMatrix(const c10::IValue& saved, int64_t d, c10::Device device);

// With rows and columns in the order of what moves, of all parameters. Throws
// unless all of them move, and are as many as it has rows and on its device.
at::Tensor MatrixOf(const at::Tensor& a,
                    const std::vector<at::Tensor>& all,
                    const std::vector<at::Tensor>& moving);

}  // namespace torch_sgmcmc
