// The CPU driver: plan -> stretches for threads -> functor.
//
// Work is cut at fixed places, and an element's result depends on its own
// inputs and noise alone, not on the number of threads.
#pragma once

#include <string.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

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
    const BothTypes<Update> updates(coefficients);
    if (!AddDeviceStep(device_step_, stream)) return;
    if (stream.step > static_cast<uint64_t>(kMaxStep)) {
      Fail(op_, "step + device_step must be in [0, 2^48)");
    }
    if (Skips(updates.template For<float>(), stream.step)) return;
    const Isa isa = ActiveIsa();
    std::vector<Segment> storage;
    ParallelOverStretches(Apart(segments, storage),
                          [&](const Segment& s, int64_t begin, int64_t end) {
                            WithElement(s.dtype, [&]<class T>(T /*element*/) {
                              const auto& update = updates.template For<T>();
                              using Of = Update<Arithmetic<T>>;
                              SG_CALL_ON(
                                  isa, RunSegment<Of, T>(update, s, begin, end,
                                                         StreamOf(s, stream)));
                            });
                          });
  }

 private:
  const char* op_;
  const Plan& plan_;
  const int64_t* device_step_;
};

}  // namespace torch_sgmcmc
