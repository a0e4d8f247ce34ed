#include <string.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "launch/parallel.h"
#include "ops/metropolis_op.h"

namespace torch_sgmcmc {
namespace {

Tensor Decide(Tensor log_ratios, int64_t proposal, int64_t purpose,
              int64_t seed, int64_t step) {
  const NoiseStream stream =
      MetropolisDecisions(log_ratios, proposal, purpose, seed, step);
  const int64_t chains = log_ratios.numel();
  Tensor result =
      torch::stable::new_empty(log_ratios, {chains}, ScalarType::Bool);
  const auto* ratio = static_cast<const double*>(log_ratios.data_ptr());
  bool* accepted = static_cast<bool*>(result.data_ptr());
  torch::stable::parallel_for(
      0, chains, kStretch, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) {
          accepted[k] =
              IndexChainAccepts(ratio[k], stream, static_cast<uint64_t>(k),
                                static_cast<uint64_t>(proposal));
        }
      });
  return result;
}

void Select(TensorList tensors, TensorList others, Tensor chosen) {
  Plan plan = ChainSelection(tensors, others, chosen);
  const bool* yes = static_cast<const bool*>(chosen.data_ptr());
  const int64_t chains = chosen.numel();
  ParallelOverStretches(
      plan.segments(), [&](const Segment& s, int64_t begin, int64_t end) {
        const int64_t row = s.numel / chains;
        const int64_t bytes = s.bytes[0];
        for (int64_t chain = begin / row; begin < end; ++chain) {
          const int64_t stop = std::min(end, (chain + 1) * row);
          if (yes[chain]) {
            memcpy(static_cast<char*>(s.data[0]) + begin * bytes,
                   static_cast<const char*>(s.data[1]) + begin * bytes,
                   static_cast<size_t>((stop - begin) * bytes));
          }
          begin = stop;
        }
      });
  plan.Finish();
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("metropolis_decide", TORCH_BOX(&torch_sgmcmc::Decide));
  m.impl("select_chains_", TORCH_BOX(&torch_sgmcmc::Select));
}
