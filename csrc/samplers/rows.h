// All operators that have a row. Whoever adds one adds it here.
#pragma once

#include <array>

#include "core/row.h"
#include "samplers/control_variate.h"
#include "samplers/ewsg.h"
#include "samplers/gauge.h"
#include "samplers/gaussian.h"
#include "samplers/gradient_variance.h"
#include "samplers/hmc.h"
#include "samplers/psgld.h"
#include "samplers/sbps.h"
#include "samplers/sghmc.h"
#include "samplers/sgld.h"
#include "samplers/sgnht.h"
#include "samplers/sum_of_squares.h"

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
