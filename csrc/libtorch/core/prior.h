// The means of Gaussian priors: torch_sgmcmc/chain/prior.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torch_sgmcmc {

// The means of these parameters' priors, as they are kept: copies in the type
// of the arithmetic. Throws unless they are one for each, of its shape and
// finite.
std::vector<at::Tensor> CopiesOfMeans(const std::vector<at::Tensor>& means,
                                      const std::vector<at::Tensor>& params);

// As an operator takes them: none if there are none.
inline std::optional<at::TensorList> MeansOf(
    const std::vector<at::Tensor>& means) {
  if (means.empty()) return std::nullopt;
  return means;
}

}  // namespace torch_sgmcmc
