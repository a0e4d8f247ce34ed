#include <torch/csrc/stable/library.h>

#include "apply/cuda.cuh"
#include "apply/reduce.cuh"
#include "samplers/sbps_op.h"

namespace torch_sgmcmc {
namespace {

struct CudaReducer {
  template <class Map>
  static void Run(const Plan& plan, const Map& map, Tensor& out) {
    ReduceOnCuda(plan, map, /*num_chains=*/1, out);
  }
};

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  SG_SBPS_OPERATORS(m, CudaDriver, CudaReducer);
}
