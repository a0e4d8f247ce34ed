#include "ops/nonfinite.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>

#include "launch/parallel.h"
#include "random/isa.h"

#define SG_EACH_ISA "ops/nonfinite_loop.inl"
#include "random/each_isa.inl"

namespace torch_sgmcmc {
namespace {

// Counting takes a tenth of an update's time (see kGrain).
constexpr int64_t kGrainToCount = 10 * kGrain;

// Calls check(element of the segment's type, segment, begin, end) for each
// stretch.
void ForEachStretch(const Plan& plan, const auto& check) {
  ParallelOverStretches(
      plan.segments(),
      [&](const Segment& s, int64_t begin, int64_t end) {
        WithElement(s.dtype, [&](auto x) { check(x, s, begin, end); });
      },
      kGrainToCount);
}

}  // namespace

bool AnyNonfiniteOf(const char* op, const TensorList& tensors,
                    const char* name) {
  std::atomic<bool> any = false;
  const Isa isa = ActiveIsa();
  ForEachStretch(PlanToCount(op, tensors, name),
                 [&]<class T>(T, const Segment& s, int64_t begin, int64_t end) {
                   const bool found = SG_CALL_ON(
                       isa, AnyNonfiniteIn<T>(s.data[0], begin, end));
                   if (found) any = true;
                 });
  return any;
}

Tensor CountNonfiniteOf(const char* op, const TensorList& tensors,
                        const char* name) {
  const Plan plan = PlanToCount(op, tensors, name);
  Tensor result = NoCounts(tensors);
  auto* all = static_cast<int64_t*>(result.data_ptr());
  const Isa isa = ActiveIsa();
  ForEachStretch(
      plan, [&]<class T>(T, const Segment& s, int64_t begin, int64_t end) {
        const Nonfinite counts =
            SG_CALL_ON(isa, CountNonfiniteIn<T>(s.data[0], begin, end));
        if (counts.nans == 0 && counts.infinities == 0) return;
        int64_t* mine = all + PlaceOfCounts(s.offset);
        std::atomic_ref(mine[0]).fetch_add(counts.nans);
        std::atomic_ref(mine[1]).fetch_add(counts.infinities);
      });
  return result;
}

namespace {

bool AnyNonfinite(TensorList tensors) {
  return AnyNonfiniteOf("any_nonfinite", tensors);
}

Tensor CountNonfinite(TensorList tensors) {
  return CountNonfiniteOf("count_nonfinite", tensors);
}

// The step, or -1, as a tensor on the device of one that is given.
Tensor Gate(const char* op, bool any, const Tensor& like, int64_t step,
            const std::optional<Tensor>& device_step) {
  const int64_t* more = CheckedDeviceStep(op, like, step, device_step);
  if (more != nullptr && *more > kMaxStep - step) {
    Fail(op, "step + device_step must be in [0, 2^48)");
  }
  Tensor result = torch::stable::new_empty(like, {}, ScalarType::Long);
  *static_cast<int64_t*>(result.data_ptr()) = GatedStep(any, step, more);
  return result;
}

Tensor StepOrNothing(Tensor counts, int64_t step,
                     std::optional<Tensor> device_step) {
  constexpr const char* kOp = "step_or_nothing";
  CheckCounts(kOp, counts);
  const bool any =
      AnyCount(static_cast<const int64_t*>(counts.data_ptr()), counts.numel(),
               /*thread=*/0,
               /*threads=*/1);
  return Gate(kOp, any, counts, step, device_step);
}

Tensor StepIfFinite(TensorList tensors, int64_t step,
                    std::optional<Tensor> device_step) {
  const bool any = AnyNonfiniteOf("step_if_finite", tensors);
  return Gate("step_if_finite", any, tensors[0], step, device_step);
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("any_nonfinite", TORCH_BOX(&torch_sgmcmc::AnyNonfinite));
  m.impl("count_nonfinite", TORCH_BOX(&torch_sgmcmc::CountNonfinite));
  m.impl("step_or_nothing", TORCH_BOX(&torch_sgmcmc::StepOrNothing));
  m.impl("step_if_finite", TORCH_BOX(&torch_sgmcmc::StepIfFinite));
}
