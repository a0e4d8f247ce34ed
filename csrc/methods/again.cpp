// Steps that are made again: a sampler's, and EWSG's from its last decision on.
#include "methods/again.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <string>
#include <utility>

#include "apply/packed.h"
#include "host/index_chain.h"
#include "methods/nonfinite_op.h"
#include "methods/rows.h"

namespace torch_sgmcmc {
namespace {

bool StepAgain(TensorList params,
               TensorList grads,
               TensorList state,
               Tensor packed,
               int64_t step) {
  constexpr const char* kOp = "step_again_";
  const PackedCall known = Unpacked(kOp, "packed", packed);
  if (known.looks != 0 && AnyNonfiniteOf(kOp, grads, "grads")) return false;
  PerformStep(kOp, known, std::move(params), std::move(grads), state, step);
  return true;
}

void Append(TensorList& tensors, TensorList::const_iterator begin, int64_t n) {
  tensors.insert(tensors.end(), begin, begin + n);
}

// 1 or 0: whether the proposal was accepted, whose gradients were then taken.
// -1: their log ratio is not finite, and nothing has changed.
int64_t EWSGStepAgain(TensorList params,
                      TensorList grads,
                      TensorList proposals,
                      TensorList state,
                      Tensor packed,
                      Tensor weights,
                      int64_t step,
                      int64_t proposal) {
  constexpr const char* kOp = "ewsg_step_again_";
  const PackedCall known = Unpacked(kOp, "packed", packed);
  const PackedCall ratio = Unpacked(kOp, "weights", weights);
  const NoiseStream stream =
      MakeStream(kOp, known.seed, step, Purpose::kIndexChain);
  CheckCount(kOp, "proposal", proposal, 0);
  if (proposal >= kMaxProposals) Fail(kOp, "proposal must be below 2^24");
  const auto count = static_cast<int64_t>(params.size());
  // Momenta come first among the state, means last.
  const int64_t momenta = ratio.lengths.size() == 2 ? ratio.lengths[1] : -1;
  const int64_t means = ratio.has_means != 0 ? count : 0;
  if (ratio.row != PlaceOf(EWSGLogRatios::kRow) ||
      (momenta != 0 && momenta != count) ||
      momenta + means > static_cast<int64_t>(state.size())) {
    Fail(kOp, "weights is no call of ewsg_log_ratio");
  }
  TensorList compared = proposals;
  Append(compared, state.begin(), momenta);
  Append(compared, state.end() - means, means);
  const double log_ratio = LogRatioOf(CallOf(
      kOp, EWSGLogRatios::kRow, ratio, params, grads, compared, /*step=*/0));
  if (known.looks != 0 && !std::isfinite(log_ratio)) return -1;
  const bool accepted = IndexChainAccepts(
      log_ratio, stream, /*chain=*/0, static_cast<uint64_t>(proposal));
  PerformStep(kOp,
              known,
              std::move(params),
              std::move(accepted ? proposals : grads),
              state,
              step);
  return accepted ? 1 : 0;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("step_again_", TORCH_BOX(&torch_sgmcmc::StepAgain));
  m.impl("ewsg_step_again_", TORCH_BOX(&torch_sgmcmc::EWSGStepAgain));
}
