// How large a Hessian may be that is kept whole.
#pragma once

#include <cstdint>

namespace torch_sgmcmc {

// Throws std::invalid_argument if the Hessian of so many parameters, which is
// added up in float64, takes more than 1 GiB. Its rows are as many passes
// through all data: long before memory ends, time does.
void CheckHessianSize(int64_t num_parameters);

}  // namespace torch_sgmcmc
