#include "ops/mclmc_turn.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace torch_sgmcmc {

Turn TurnOfSums(const char* op, const Tensor& sums, const Tensor& energy,
                const TurnNumbers& n, int64_t dimension) {
  const int64_t chains = ChainsOfTurn(op, sums, energy, n, dimension);
  Turn result = NewTurn(sums, chains);
  const auto at = [](const Tensor& t) {
    return static_cast<double*>(t.data_ptr());
  };
  for (int64_t k = 0; k < chains; ++k) {
    TurnChain(n, at(sums) + k, sums.size(0), chains,
              at(energy) + k * kEnergyNumbers,
              at(std::get<0>(result)) + k * kTurnNumbers,
              at(std::get<1>(result)) + k * kEnergyNumbers);
  }
  return result;
}

namespace {

Turn MakeTurn(Tensor sums, Tensor energy, double step_size, double momentum,
              int64_t dimension, double scale) {
  return TurnOfSums(
      "mclmc_turn", sums, energy,
      {step_size, momentum, static_cast<double>(dimension), scale}, dimension);
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("mclmc_turn", TORCH_BOX(&torch_sgmcmc::MakeTurn));
}
