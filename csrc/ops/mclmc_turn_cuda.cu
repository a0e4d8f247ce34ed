#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "launch/cuda.cuh"
#include "ops/mclmc_turn.h"

namespace torch_sgmcmc {
namespace {

__global__ void __launch_bounds__(kThreads)
    TurnKernel(const TurnNumbers n, const double* sums, int64_t tensors,
               int64_t chains, const double* before, double* turns,
               double* energy) {
  const int64_t k = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (k < chains) {
    TurnChain(n, sums + k, tensors, chains, before + k * kEnergyNumbers,
              turns + k * kTurnNumbers, energy + k * kEnergyNumbers);
  }
}

Turn MakeTurn(Tensor sums, Tensor energy, double step_size, double momentum,
              int64_t dimension, double scale) {
  const TurnNumbers n{step_size, momentum, static_cast<double>(dimension),
                      scale};
  const int64_t chains = ChainsOfTurn("mclmc_turn", sums, energy, n, dimension);
  const int32_t device = sums.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Turn result = NewTurn(sums, chains);
  const auto at = [](Tensor& t) { return static_cast<double*>(t.data_ptr()); };
  if (chains == 0) return result;
  const auto blocks = static_cast<unsigned>((chains + kThreads - 1) / kThreads);
  TurnKernel<<<blocks, kThreads, 0, CurrentStream(device)>>>(
      n, at(sums), sums.size(0), chains, at(energy), at(std::get<0>(result)),
      at(std::get<1>(result)));
  CheckCuda(cudaGetLastError(), "kernel launch failed");
  return result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("mclmc_turn", TORCH_BOX(&torch_sgmcmc::MakeTurn));
}
