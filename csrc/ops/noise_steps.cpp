// torch_sgmcmc::noise_steps_: the noise of several steps, on the CPU.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/cpu.h"
#include "launch/plan.h"
#include "ops/gaussian.h"
#include "ops/sglrw.h"

namespace torch_sgmcmc {

// The noise of an update that takes uniforms (Note kTakesUniforms, roles.h).
template <class Real>
class UniformFill : public GaussianFill<Real> {
 public:
  static constexpr bool kUniformNoise = true;
  explicit UniformFill(const GaussianCoefficients& c) : GaussianFill<Real>(c) {}
};

namespace {

constexpr const char* kOp = "noise_steps_";

// Row s of each tensor gets the noise of step + s. The tensors have equally
// long rows of memory, since they are parts of one array of rows.
void NoiseSteps(TensorList out, std::vector<int64_t> offsets, bool uniform,
                int64_t seed, int64_t step, int64_t num_chains) {
  if (out.empty()) return;
  const int64_t steps = out[0].size(0);
  const int64_t stride = out[0].stride(0);
  TensorList first;
  for (const Tensor& tensor : out) {
    if (tensor.size(0) != steps || tensor.stride(0) != stride) {
      Fail(kOp, "out must be parts of one tensor with a row for each step");
    }
    first.push_back(torch::stable::select(tensor, 0, 0));
    if (!first.back().is_contiguous()) {
      Fail(kOp, "out must be contiguous within a row");
    }
  }
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kUpdate);
  MakeStream(kOp, seed, step + steps, Purpose::kUpdate);  // in range, too
  const Plan plan(kOp, {{"out", Role::kOutput, first}}, offsets,
                  /*num_chains=*/1, {std::nullopt, num_chains});
  const CpuDriver driver(kOp, plan, std::nullopt);
  const GaussianCoefficients one(1.0);
  std::vector<Segment> segments = plan.segments();
  for (int64_t s = 0; s < steps; ++s) {
    NoiseStream now = stream;
    now.step += static_cast<uint64_t>(s);
    if (uniform) {
      driver.Apply<UniformFill>(one, now, segments);
    } else {
      driver.Apply<GaussianFill>(one, now, segments);
    }
    for (Segment& segment : segments) {
      segment.data[0] =
          static_cast<char*>(segment.data[0]) + stride * segment.bytes[0];
    }
  }
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("noise_steps_", TORCH_BOX(&torch_sgmcmc::NoiseSteps));
}
