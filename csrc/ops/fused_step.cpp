#include "ops/fused_step.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "host/index_chain.h"
#include "ops/ewsg.h"

namespace torch_sgmcmc {

namespace {

bool FusedStep(TensorList params, TensorList grads, TensorList state,
               Tensor packed, Tensor step) {
  const auto any_nonfinite = [](const char* op, const TensorList& tensors) {
    return AnyNonfiniteOf(op, tensors, "grads");
  };
  return FusedStepOn(CpuUpdates(), any_nonfinite, params, grads, state, packed,
                     step);
}

// Counts like a GPU, whose check the host reads later.
std::tuple<Tensor, Tensor> DeferredStep(TensorList params, TensorList grads,
                                        TensorList state, Tensor packed,
                                        Tensor step,
                                        std::optional<Tensor> num_skipped,
                                        std::optional<Tensor> counts) {
  constexpr const char* kOp = "deferred_step_";
  const PackedStep known = Unpacked(kOp, "packed", packed);
  int64_t* count = HostCounter(kOp, step);
  int64_t* skipped = num_skipped ? HostCounter(kOp, *num_skipped) : nullptr;
  if (counts) CheckCounts(kOp, *counts);
  if (grads.empty()) Fail(kOp, "grads is empty");
  if (!grads[0].defined()) Fail(kOp, "grads[0] is undefined");
  const Tensor found = counts ? *counts
                       : known.checks != 0
                           ? CountNonfiniteOf(kOp, grads, "grads")
                           : NoCounts(grads);
  const bool any =
      AnyCount(static_cast<const int64_t*>(found.data_ptr()), found.numel(),
               /*thread=*/0,
               /*threads=*/1);
  MakeStream(kOp, /*seed=*/0, *count, /*purpose=*/int64_t{0});
  Tensor gate = torch::stable::new_empty(found, {}, ScalarType::Long);
  *static_cast<int64_t*>(gate.data_ptr()) =
      GatedStep(any, *count, /*device_step=*/nullptr);
  PreparedStep prepared(kOp, CpuUpdates(), known, params, grads, state,
                        /*step=*/0, gate);
  prepared.Apply(nullptr);
  CountStep(any, count, skipped);
  return {found, gate};
}

// A part of a list, up to its end.
TensorList PartOf(const TensorList& tensors, int64_t begin, int64_t n) {
  const auto size = static_cast<int64_t>(tensors.size());
  return {tensors.begin() + std::min(begin, size),
          tensors.begin() + std::min(begin + n, size)};
}

// 1: the last proposal was accepted, and its gradients used; 0: rejected. -1:
// the log ratio is not finite, and nothing has changed.
int64_t EWSGStep(TensorList params, TensorList grads, TensorList proposals,
                 TensorList state, Tensor packed, Tensor weights, Tensor step,
                 int64_t proposal) {
  constexpr const char* kOp = "ewsg_step_";
  const PackedStep known = Unpacked(kOp, "packed", packed);
  const PackedStep ratios = Unpacked(kOp, "weights", weights);
  int64_t* count = HostCounter(kOp, step);
  const NoiseStream stream =
      MakeStream(kOp, known.seed, *count, Purpose::kIndexChain);
  CheckCount(kOp, "proposal", proposal, 0);
  if (proposal >= kMaxProposals) Fail(kOp, "proposal must be below 2^24");
  if (ratios.calls.size() != known.calls.size()) {
    Fail(kOp, "weights is not a call of ewsg_log_ratio for each group");
  }
  double log_ratio = 0;
  int64_t first_param = 0;
  int64_t first_state = 0;
  const auto append = [](TensorList& tensors, const TensorList& more) {
    tensors.insert(tensors.end(), more.begin(), more.end());
  };
  for (size_t i = 0; i < ratios.calls.size(); ++i) {
    const PackedCall& of = known.calls[i];
    const PackedCall& ratio = ratios.calls[i];
    const auto length = static_cast<int64_t>(of.offsets.size());
    // A group's momenta come first in its state, its means last.
    const int64_t momenta = ratio.lengths.size() == 2 ? ratio.lengths[1] : -1;
    if (SpecOf(ratio) != &EWSGLogRatios::kSpec || momenta < 0 ||
        ratio.offsets != of.offsets || ratio.has_means != of.has_means) {
      Fail(kOp, "weights is not a call of ewsg_log_ratio for each group");
    }
    int64_t lists = 0;
    for (const int64_t each : of.lengths) lists += std::max<int64_t>(0, each);
    TensorList compared = PartOf(proposals, first_param, length);
    append(compared, PartOf(state, first_state, momenta));
    if (of.has_means != 0) {
      append(compared, PartOf(state, first_state + lists, length));
      lists += length;
    }
    const TensorList own_params = PartOf(params, first_param, length);
    const TensorList own_grads = PartOf(grads, first_param, length);
    PackedTensors tensors(kOp, own_params, own_grads, compared);
    Call call = tensors.Next(EWSGLogRatios::kSpec, ratio);
    tensors.CheckIsEmpty();
    log_ratio += LogRatioOf(call);
    first_param += length;
    first_state += lists;
  }
  if (known.checks != 0 && !std::isfinite(log_ratio)) return -1;
  const bool accepted = IndexChainAccepts(log_ratio, stream, /*chain=*/0,
                                          static_cast<uint64_t>(proposal));
  PreparedStep prepared(kOp, CpuUpdates(), known, params,
                        accepted ? proposals : grads, state, *count);
  prepared.Apply(count);
  return accepted ? 1 : 0;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("fused_step_", TORCH_BOX(&torch_sgmcmc::FusedStep));
  m.impl("deferred_step_", TORCH_BOX(&torch_sgmcmc::DeferredStep));
  m.impl("ewsg_step_", TORCH_BOX(&torch_sgmcmc::EWSGStep));
}
