#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>

#include "apply/parallel.h"
#include "core/isa.h"
#include "samplers/nonfinite_op.h"

#define SG_EACH_ISA "samplers/nonfinite_loop.inl"
#include "core/each_isa.inl"

namespace torch_sgmcmc {
namespace {

// To count takes a tenth of the time of an update (see kGrain).
constexpr int64_t kGrainToCount = 10 * kGrain;

template <class T>
Nonfinite CountOnIsa(const void* data, int64_t begin, int64_t end, Isa isa) {
#if defined(SG_X86)
  if (isa == Isa::kAvx512) {
    return avx512::CountNonfiniteIn<T>(data, begin, end);
  }
  if (isa == Isa::kAvx2) return avx2::CountNonfiniteIn<T>(data, begin, end);
#endif
  static_cast<void>(isa);
  return portable::CountNonfiniteIn<T>(data, begin, end);
}

// Calls found(segment, counts) for the stretches that are not all finite.
template <class Found>
void ForEachFind(const Plan& plan, const Found& found) {
  const Isa isa = ActiveIsa();
  ParallelOverStretches(
      plan.segments(),
      [&](const Segment& s, int64_t begin, int64_t end) {
        Nonfinite counts;
        switch (s.dtype) {
          case ScalarType::Double:
            counts = CountOnIsa<double>(s.data[0], begin, end, isa);
            break;
          case ScalarType::BFloat16:
            counts = CountOnIsa<torch::headeronly::BFloat16>(
                s.data[0], begin, end, isa);
            break;
          case ScalarType::Half:
            counts =
                CountOnIsa<torch::headeronly::Half>(s.data[0], begin, end, isa);
            break;
          default:
            counts = CountOnIsa<float>(s.data[0], begin, end, isa);
        }
        if (counts.nans > 0 || counts.infinities > 0) found(s, counts);
      },
      kGrainToCount);
}

bool AnyNonfinite(TensorList tensors) {
  std::atomic<bool> any = false;
  ForEachFind(PlanToCount("any_nonfinite", tensors),
              [&](const Segment&, const Nonfinite&) { any = true; });
  return any;
}

Tensor CountNonfinite(TensorList tensors) {
  const Plan plan = PlanToCount("count_nonfinite", tensors);
  Tensor result = NoCounts(tensors);
  auto* all = static_cast<int64_t*>(result.data_ptr());
  ForEachFind(plan, [&](const Segment& s, const Nonfinite& counts) {
    int64_t* mine = all + PlaceOfCounts(s.offset);
    std::atomic_ref(mine[0]).fetch_add(counts.nans);
    std::atomic_ref(mine[1]).fetch_add(counts.infinities);
  });
  return result;
}

Tensor StepOrNothing(Tensor counts,
                     int64_t step,
                     std::optional<Tensor> device_step) {
  const int64_t* more = CheckedDeviceStep(counts, step, device_step);
  if (more != nullptr && *more > kMaxStep - step) {
    Fail("step_or_nothing", "step + device_step must be in [0, 2^48)");
  }
  Tensor result = torch::stable::new_empty(counts, {}, ScalarType::Long);
  *static_cast<int64_t*>(result.data_ptr()) =
      GatedStep(AnyCount(static_cast<const int64_t*>(counts.data_ptr()),
                         counts.numel(),
                         /*thread=*/0,
                         /*threads=*/1),
                step,
                more);
  return result;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("any_nonfinite", TORCH_BOX(&torch_sgmcmc::AnyNonfinite));
  m.impl("count_nonfinite", TORCH_BOX(&torch_sgmcmc::CountNonfinite));
  m.impl("step_or_nothing", TORCH_BOX(&torch_sgmcmc::StepOrNothing));
}
