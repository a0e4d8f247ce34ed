// The common part of metropolis_decide and select_chains_: Metropolis tests of
// many chains, and the moves of accepted ones.
#pragma once

#include <cstdint>
#include <vector>

#include "host/index_chain.h"
#include "launch/plan.h"

namespace torch_sgmcmc {

inline NoiseStream MetropolisDecisions(const Tensor& log_ratios,
                                       int64_t proposal, int64_t purpose,
                                       int64_t seed, int64_t step) {
  constexpr const char* kOp = "metropolis_decide";
  if (proposal < 0 || proposal >= kMaxProposals) {
    Fail(kOp, "Invalid proposal: ", proposal, " (must be in [0, 2^24))");
  }
  if (!log_ratios.defined() || log_ratios.scalar_type() != ScalarType::Double ||
      log_ratios.dim() != 1 || !log_ratios.is_contiguous()) {
    Fail(kOp, "log_ratios must be one contiguous row of float64");
  }
  return MakeStream(kOp, seed, step, purpose);
}

inline Plan ChainSelection(const TensorList& tensors, const TensorList& others,
                           const Tensor& chosen) {
  constexpr const char* kOp = "select_chains_";
  if (!chosen.defined() || chosen.scalar_type() != ScalarType::Bool ||
      chosen.dim() != 1 || !chosen.is_contiguous() || chosen.numel() == 0) {
    Fail(kOp, "chosen must be one contiguous row of bool");
  }
  Plan plan(kOp,
            {{"tensors", Role::kInPlace, tensors},
             {"others", Role::kGradient, others}},
            std::vector<int64_t>(tensors.size(), 0), chosen.numel());
  if (!tensors.empty() && (chosen.is_cuda() != plan.on_cuda() ||
                           chosen.get_device_index() != plan.device_index())) {
    Fail(kOp, "chosen is on another device than the tensors");
  }
  return plan;
}

}  // namespace torch_sgmcmc
