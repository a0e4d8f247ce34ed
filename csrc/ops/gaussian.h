// Gaussian fill, shared by CPU and CUDA: out <- std xi.
//
// The same noise as in an update with this seed, step, purpose and offsets.
#pragma once

#include <array>
#include <cstdint>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// The steps of an update. In a CUDA graph only the device knows the step: an
// operator with several updates launches all, with filters.
struct EveryKSteps {
  int64_t every = 0;         // 0: all steps
  bool on_multiples = true;  // of `every`, or on all other steps

  SG_HOST_DEVICE bool Skips(uint64_t step) const {
    return every != 0 &&
           (step % static_cast<uint64_t>(every) == 0) != on_multiples;
  }
};

struct GaussianCoefficients {
  explicit GaussianCoefficients(double std, EveryKSteps filter = {})
      : std(std), filter(filter) {}

  double std;
  EveryKSteps filter = {};
};

template <class Real>
class GaussianFill {
 public:
  static constexpr std::array<Role, 1> kRoles = {Role::kOutput};

  explicit GaussianFill(const GaussianCoefficients& c)
      : std_(static_cast<Real>(c.std)), filter_(c.filter) {}
  explicit GaussianFill(const auto& number)
      : GaussianFill(GaussianCoefficients(number("std"))) {}

  SG_HOST_DEVICE bool needs_noise() const { return std_ != 0; }
  SG_HOST_DEVICE bool skips(uint64_t step) const { return filter_.Skips(step); }

  SG_INLINE void operator()(Real (&x)[1], Real xi) const { x[0] = std_ * xi; }

 private:
  Real std_;
  EveryKSteps filter_;
};

struct Gaussian : UpdatedBy<GaussianFill> {
  static constexpr OpSpec kSpec = {.op = "gaussian_",
                                   .lists = {{"out", Role::kOutput}},
                                   .numbers = {{"std", Domain::kNotNegative}},
                                   .noise = Noise::kGiven};
  // With a device_step, `out` may keep its values.
  static Role Lead(const auto& call) {
    return call->device_step ? Role::kParameter : Role::kOutput;
  }
};

}  // namespace torch_sgmcmc
