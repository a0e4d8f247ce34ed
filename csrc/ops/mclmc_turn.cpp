#include "ops/mclmc_turn.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace torch_sgmcmc {
namespace {

Turn MakeTurn(Tensor sums, Tensor energy, double step_size, double momentum,
              double dimension, double scale) {
  const TurnNumbers n{step_size, momentum, dimension, scale};
  const int64_t chains = ChainsOfTurn(sums, energy, n);
  Turn result = NewTurn(sums, chains);
  const auto at = [](Tensor& t) { return static_cast<double*>(t.data_ptr()); };
  for (int64_t k = 0; k < chains; ++k) {
    TurnChain(n, at(sums) + k, sums.size(0), chains,
              at(energy) + k * kEnergyNumbers,
              at(std::get<0>(result)) + k * kTurnNumbers,
              at(std::get<1>(result)) + k * kEnergyNumbers);
  }
  return result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("mclmc_turn", TORCH_BOX(&torch_sgmcmc::MakeTurn));
}
