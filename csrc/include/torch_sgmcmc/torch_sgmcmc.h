// Stochastic-gradient MCMC as torch optimizers: all of the library.
#pragma once

#include "torch_sgmcmc/control_variates.h"
#include "torch_sgmcmc/ewsg.h"
#include "torch_sgmcmc/has_cuda.h"
#include "torch_sgmcmc/hmc.h"
#include "torch_sgmcmc/hmcecs.h"
#include "torch_sgmcmc/minibatch.h"
#include "torch_sgmcmc/precision.h"
#include "torch_sgmcmc/psgld.h"
#include "torch_sgmcmc/sampler.h"
#include "torch_sgmcmc/sbps.h"
#include "torch_sgmcmc/seeds.h"
#include "torch_sgmcmc/sghmc.h"
#include "torch_sgmcmc/sgld.h"
#include "torch_sgmcmc/sgnht.h"
#include "torch_sgmcmc/state_dict.h"
#include "torch_sgmcmc/trajectory.h"
