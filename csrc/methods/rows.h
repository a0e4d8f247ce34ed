// All operators that have a row. Whoever adds one adds it here.
#pragma once

#include <array>

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

inline constexpr std::array kRows = {&SGLDStep::kRow,
                                     &SGHMCStep::kRow,
                                     &SGHMCByCoordinateStep::kRow,
                                     &PSGLDStep::kRow,
                                     &PSGLDFrozenStep::kRow,
                                     &SGNHTStep::kRow,
                                     &GradientVarianceStep::kRow,
                                     &ControlVariate::kRow,
                                     &Gaussian::kRow,
                                     &EWSGLogRatios::kRow,
                                     &HMCMomenta::kRow,
                                     &HMCLeapfrog::kRow,
                                     &HMCEnergy::kRow,
                                     &SBPSPlace::kRow,
                                     &SBPSReflect::kRow,
                                     &SBPSAdapt::kRow,
                                     &SBPSPrecondition::kRow,
                                     &SBPSReflectSums::kRow,
                                     &SBPSPreconditionSums::kRow,
                                     &SBPSSumsOfLine::kRow,
                                     &SBPSSumsOfReflection::kRow,
                                     &SBPSSumOfPreconditioner::kRow,
                                     &SumsForGauges::kRow,
                                     &SumOfSquares::kRow};

}  // namespace torch_sgmcmc
