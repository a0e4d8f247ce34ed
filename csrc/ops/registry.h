// All operators with a spec.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/baoa.h"
#include "ops/control_variate.h"
#include "ops/ewsg.h"
#include "ops/gaussian.h"
#include "ops/gradient_variance.h"
#include "ops/hmc.h"
#include "ops/op_spec.h"
#include "ops/psgld.h"
#include "ops/sbps.h"
#include "ops/sghmc.h"
#include "ops/sgld.h"
#include "ops/sglrw.h"
#include "ops/sgnht.h"
#include "ops/squares.h"
#include "ops/temperature_sums.h"

namespace torch_sgmcmc {

template <class... Ops>
struct Operators {
  static constexpr size_t kCount = sizeof...(Ops);
  static constexpr std::array<const OpSpec*, kCount> kOpSpecs = {
      &Ops::kSpec...};

  // Calls `visit` with std::type_identity of each.
  template <class Visit>
  static void ForEach(Visit visit) {
    (visit(std::type_identity<Ops>()), ...);
  }
};

// Steps of samplers, compiled apart to use a second processor.
using SamplerOperators =
    Operators<SGLDStep, SGHMCStep, PSGLDStep, PSGLDFrozenStep, SGNHTStep,
              SGLRWStep, BAOAStep>;
// Other updates, and sums.
using UpdateOperators =
    Operators<GradientVarianceStep, ControlVariate, Gaussian, SquareRoots,
              HMCMomenta, HMCLeapfrog, SBPSPlace, SBPSReflect, SBPSAdapt,
              SBPSPrecondition>;
using SumOperators =
    Operators<EWSGLogRatios, HMCEnergy, SBPSReflectSums, SBPSPreconditionSums,
              SBPSSumsOfLine, SBPSSumsOfReflection, SBPSSumOfPreconditioner,
              TemperatureSums, SumOfSquares>;

template <class... Lists>
struct Joined {
  static constexpr auto kOpSpecs = [] {
    std::array<const OpSpec*, (Lists::kCount + ...)> specs = {};
    size_t count = 0;
    const auto add = [&](const auto& some) {
      for (const OpSpec* spec : some) specs[count++] = spec;
    };
    (add(Lists::kOpSpecs), ...);
    return specs;
  }();

  template <class Visit>
  static void ForEach(Visit visit) {
    (Lists::ForEach(visit), ...);
  }
};
using AllOperators = Joined<SamplerOperators, UpdateOperators, SumOperators>;
inline constexpr auto& kOpSpecs = AllOperators::kOpSpecs;

// The index of a spec.
constexpr int64_t PlaceOf(const OpSpec& spec) {
  for (size_t i = 0; i < kOpSpecs.size(); ++i) {
    if (kOpSpecs[i] == &spec) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace torch_sgmcmc
