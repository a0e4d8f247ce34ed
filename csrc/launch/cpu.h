// The CPU driver: plan -> stretches for threads -> functor.
//
// Work is cut at fixed places, and an element's result depends on its own
// inputs and noise alone, not on the number of threads.
#pragma once

#include <math.h>
#include <string.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "launch/elements.h"
#include "launch/parallel.h"
#include "launch/plan.h"
#include "ops/roles.h"
#include "random/counter.h"
#include "random/isa.h"
#include "random/macros.h"
#include "random/portable_noise.h"

#if defined(SG_X86)
SG_REGION_AVX512
namespace torch_sgmcmc::avx512 {
#include "random/lanes_avx512.inl"
#include "random/noise.inl"
}  // namespace torch_sgmcmc::avx512
SG_REGION_END

SG_REGION_AVX2
namespace torch_sgmcmc::avx2 {
#include "random/lanes_avx2.inl"
// NOLINTNEXTLINE(readability-duplicate-include): once for each instruction set.
#include "random/noise.inl"
}  // namespace torch_sgmcmc::avx2
SG_REGION_END
#endif

#define SG_EACH_ISA "launch/row_noise.inl"
#include "random/each_isa.inl"

#define SG_EACH_ISA "launch/cpu_loop.inl"
#include "random/each_isa.inl"

namespace torch_sgmcmc {

template <class Update, class T>
void RunSegmentOnIsa(const Update& update, const Segment& segment,
                     int64_t begin, int64_t end, const NoiseStream& stream,
                     Isa isa) {
#if defined(SG_X86)
  if (isa == Isa::kAvx512) {
    return avx512::RunSegment<Update, T>(update, segment, begin, end, stream);
  }
  if (isa == Isa::kAvx2) {
    return avx2::RunSegment<Update, T>(update, segment, begin, end, stream);
  }
#endif
  static_cast<void>(isa);
  portable::RunSegment<Update, T>(update, segment, begin, end, stream);
}

// The noise of a segment, which may be one of several chains.
inline NoiseStream StreamOf(const Segment& s, NoiseStream stream) {
  if (s.num_chains > 0) {
    stream.seed =
        portable::ChainSeed(stream.seed, static_cast<uint64_t>(s.chain));
  }
  return stream;
}

// Applies update functors to a plan on the CPU.
class CpuDriver {
 public:
  CpuDriver(const char* op, const Plan& plan,
            const std::optional<Tensor>& device_step)
      : op_(op), plan_(plan), device_step_(DeviceStep(op, plan, device_step)) {}

  // Applies Update<float> and Update<double> with these coefficients to every
  // element of the plan (or of `segments`).
  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients, NoiseStream stream) const {
    Apply<Update>(coefficients, stream, plan_.segments());
  }

  template <template <class> class Update, class Coefficients>
  void Apply(const Coefficients& coefficients, NoiseStream stream,
             const std::vector<Segment>& segments) const {
    const Update<float> single(coefficients);
    const Update<double> twice(coefficients);
    if (!AddDeviceStep(device_step_, stream)) return;
    if (stream.step > static_cast<uint64_t>(kMaxStep)) {
      Fail(op_, "step + device_step must be in [0, 2^48)");
    }
    if (single.skips(stream.step)) return;
    const Isa isa = ActiveIsa();
    std::vector<Segment> storage;
    ParallelOverStretches(Apart(segments, storage), [&](const Segment& s,
                                                        int64_t begin,
                                                        int64_t end) {
      const NoiseStream own = StreamOf(s, stream);
      switch (s.dtype) {
        case ScalarType::Double:
          return RunSegmentOnIsa<Update<double>, double>(twice, s, begin, end,
                                                         own, isa);
        case ScalarType::BFloat16:
          return RunSegmentOnIsa<Update<float>, torch::headeronly::BFloat16>(
              single, s, begin, end, own, isa);
        case ScalarType::Half:
          return RunSegmentOnIsa<Update<float>, torch::headeronly::Half>(
              single, s, begin, end, own, isa);
        default:
          return RunSegmentOnIsa<Update<float>, float>(single, s, begin, end,
                                                       own, isa);
      }
    });
  }

 private:
  const char* op_;
  const Plan& plan_;
  const int64_t* device_step_;
};

}  // namespace torch_sgmcmc
