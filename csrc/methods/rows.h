// All operators that have a row: whoever adds one adds it here, and nowhere
// else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/row.h"
#include "methods/baoa.h"
#include "methods/control_variate.h"
#include "methods/ewsg.h"
#include "methods/gauge.h"
#include "methods/gaussian.h"
#include "methods/gradient_variance.h"
#include "methods/hmc.h"
#include "methods/psgld.h"
#include "methods/sbps.h"
#include "methods/sghmc.h"
#include "methods/sgld.h"
#include "methods/sglrw.h"
#include "methods/sgnht.h"
#include "methods/square_root.h"
#include "methods/sum_of_squares.h"

namespace torch_sgmcmc {

template <class... Ops>
struct Operators {
  static constexpr size_t kCount = sizeof...(Ops);
  static constexpr std::array<const Row*, kCount> kRows = {&Ops::kRow...};

  // Calls `visit` with std::type_identity of each.
  template <class Visit>
  static void ForEach(Visit visit) {
    (visit(std::type_identity<Ops>()), ...);
  }
};

// A step of a sampler: compiled by themselves, in half of the library's time.
using SamplerOperators = Operators<SGLDStep,
                                   SGHMCStep,
                                   PSGLDStep,
                                   PSGLDFrozenStep,
                                   SGNHTStep,
                                   SGLRWStep,
                                   BAOAStep>;
// Others that update, and what sums.
using UpdateOperators = Operators<GradientVarianceStep,
                                  ControlVariate,
                                  Gaussian,
                                  SquareRoots,
                                  HMCMomenta,
                                  HMCLeapfrog,
                                  SBPSPlace,
                                  SBPSReflect,
                                  SBPSAdapt,
                                  SBPSPrecondition>;
using SumOperators = Operators<EWSGLogRatios,
                               HMCEnergy,
                               SBPSReflectSums,
                               SBPSPreconditionSums,
                               SBPSSumsOfLine,
                               SBPSSumsOfReflection,
                               SBPSSumOfPreconditioner,
                               SumsForGauges,
                               SumOfSquares>;

template <class... Lists>
struct Joined {
  static constexpr auto kRows = [] {
    std::array<const Row*, (Lists::kCount + ...)> rows = {};
    size_t count = 0;
    const auto add = [&](const auto& some) {
      for (const Row* row : some) rows[count++] = row;
    };
    (add(Lists::kRows), ...);
    return rows;
  }();

  template <class Visit>
  static void ForEach(Visit visit) {
    (Lists::ForEach(visit), ...);
  }
};
using AllOperators = Joined<SamplerOperators, UpdateOperators, SumOperators>;
inline constexpr auto& kRows = AllOperators::kRows;

// Where a row stands among them.
constexpr int64_t PlaceOf(const Row& row) {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i] == &row) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace torch_sgmcmc
