#include <torch/csrc/stable/library.h>

#include <optional>

#include "apply/cuda.cuh"
#include "apply/reduce.cuh"
#include "samplers/hmc_op.h"

namespace torch_sgmcmc {
namespace {

Tensor Energy(TensorList params,
              TensorList momenta,
              TensorList masses,
              double prior_precision,
              int64_t num_chains) {
  std::optional<Tensor> result;
  HMCEnergies(params,
              momenta,
              masses,
              prior_precision,
              num_chains,
              [&](const Plan& plan, const auto& map) {
                result = torch::stable::new_empty(
                    params[0], {num_chains}, ScalarType::Double);
                ReduceOnCuda(plan, map, num_chains, *result);
              });
  return *result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  using torch_sgmcmc::CudaDriver;
  m.impl("hmc_momenta_", TORCH_BOX(&torch_sgmcmc::HMCMomenta<CudaDriver>));
  m.impl("hmc_leapfrog_", TORCH_BOX(&torch_sgmcmc::HMCLeapfrog<CudaDriver>));
  m.impl("hmc_energy", TORCH_BOX(&torch_sgmcmc::Energy));
}
