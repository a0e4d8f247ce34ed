// Diagonal matrices that users give: torch_sgmcmc/chain/diagonal.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torch_sgmcmc {

// A matrix for each parameter, as it is kept: a copy of its shape and layout.
// Throws unless they are one for each, that broadcasts to it, finite and > 0.
std::vector<at::Tensor> Diagonals(const char* what,
                                  const std::vector<at::Tensor>& given,
                                  const std::vector<at::Tensor>& params);

// Throws if the saved diagonal of a parameter is out of range in its precision.
void CheckSavedDiagonal(const char* name,
                        int64_t index,
                        const at::Tensor& value);

}  // namespace torch_sgmcmc
