// All operators that have a row. Whoever adds one adds it here.
#pragma once

#include <array>
#include <type_traits>

#include "core/row.h"
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
#include "methods/sgnht.h"
#include "methods/sum_of_squares.h"

namespace torch_sgmcmc {

template <class... Ops>
struct OpList {
  static constexpr std::array kRows = {&Ops::kRow...};

  // Calls `visit` with std::type_identity of each.
  template <class Visit>
  static void ForEach(Visit visit) {
    (visit(std::type_identity<Ops>()), ...);
  }
};

using AllOps = OpList<SGLDStep,
                      SGHMCStep,
                      SGHMCByCoordinateStep,
                      PSGLDStep,
                      PSGLDFrozenStep,
                      SGNHTStep,
                      GradientVarianceStep,
                      ControlVariate,
                      Gaussian,
                      EWSGLogRatios,
                      HMCMomenta,
                      HMCLeapfrog,
                      HMCEnergy,
                      SBPSPlace,
                      SBPSReflect,
                      SBPSAdapt,
                      SBPSPrecondition,
                      SBPSReflectSums,
                      SBPSPreconditionSums,
                      SBPSSumsOfLine,
                      SBPSSumsOfReflection,
                      SBPSSumOfPreconditioner,
                      SumsForGauges,
                      SumOfSquares>;
inline constexpr auto& kRows = AllOps::kRows;

}  // namespace torch_sgmcmc
