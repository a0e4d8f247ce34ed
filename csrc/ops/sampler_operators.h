// The steps of samplers.
#pragma once

#include "ops/baoa.h"
#include "ops/mclmc.h"
#include "ops/psgld.h"
#include "ops/sghmc.h"
#include "ops/sgld.h"
#include "ops/sglrw.h"
#include "ops/sgnht.h"

namespace torch_sgmcmc {

// Compiled apart to use a second processor.
using SamplerOperators =
    Operators<SGLDStep, SGHMCStep, PSGLDStep, PSGLDFrozenStep, SGNHTStep,
              SGLRWStep, BAOAStep, MCLMCStep, SGHMCPreconditionedStep,
              BAOAPreconditionedStep>;

}  // namespace torch_sgmcmc
