#pragma once

#include "torch_sgmcmc/export.h"

namespace torch_sgmcmc {

/// Whether this build has CUDA kernels.
TORCH_SGMCMC_API bool has_cuda();

}  // namespace torch_sgmcmc
