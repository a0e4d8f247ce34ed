// The common part of mclmc_turn on CPU and CUDA: its checks.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <tuple>

#include "launch/plan.h"
#include "ops/mclmc.h"

namespace torch_sgmcmc {

// Throws unless both are of one number of chains, on one device.
inline int64_t ChainsOfTurn(const char* op, const Tensor& sums,
                            const Tensor& energy, const TurnNumbers& n,
                            int64_t dimension) {
  const auto is_table = [](const Tensor& t, int64_t dim) {
    return t.defined() && t.scalar_type() == ScalarType::Double &&
           t.dim() == dim && t.is_contiguous();
  };
  if (!is_table(sums, 3) || sums.size(1) != 6 || !is_table(energy, 2) ||
      energy.size(0) != sums.size(2) || energy.size(1) != kEnergyNumbers ||
      sums.get_device_index() != energy.get_device_index() ||
      sums.is_cuda() != energy.is_cuda()) {
    Fail(op,
         "sums and energy must be contiguous float64 of shapes [P, 6, K] and "
         "[K, 4], on one device");
  }
  CheckNumber(op, "step_size", n.step_size, {});
  CheckNumber(op, "momentum", n.momentum, {.high = 1});
  CheckCount(op, "dimension", dimension, 2);
  CheckNumber(op, "scale", n.scale, {.low_open = true});
  return sums.size(2);
}

using Turn = std::tuple<Tensor, Tensor>;

// On the CPU, from [P, 6, K].
Turn TurnOfSums(const char* op, const Tensor& sums, const Tensor& energy,
                const TurnNumbers& n, int64_t dimension);

inline Turn NewTurn(const Tensor& sums, int64_t chains) {
  return {torch::stable::new_empty(sums, {chains, kTurnNumbers},
                                   ScalarType::Double),
          torch::stable::new_empty(sums, {chains, kEnergyNumbers},
                                   ScalarType::Double)};
}

}  // namespace torch_sgmcmc
