// Updates that are no sampler's step, and sums.
#pragma once

#include "ops/ewsg.h"
#include "ops/gaussian.h"
#include "ops/gradients.h"
#include "ops/hmc.h"
#include "ops/mclmc.h"
#include "ops/sbps.h"
#include "ops/temperature_sums.h"

namespace torch_sgmcmc {

using UpdateOperators =
    Operators<GradientVarianceStep, ControlVariate, Gaussian, SquareRoots,
              HMCMomenta, HMCLeapfrog, SBPSPlace, SBPSReflect, SBPSAdapt,
              SBPSPrecondition, RunningMean>;
using SumOperators =
    Operators<EWSGLogRatios, HMCEnergy, SBPSReflectSums, SBPSPreconditionSums,
              SBPSSumsOfLine, SBPSSumsOfReflection, SBPSSumOfPreconditioner,
              TemperatureSums, SumOfSquares, MCLMCSums>;

}  // namespace torch_sgmcmc
