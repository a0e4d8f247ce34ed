// Stochastic-gradient MCMC as torch optimizers: all of the library.
#pragma once

#include "torch_sgmcmc/baoa.h"
#include "torch_sgmcmc/ewsg.h"
#include "torch_sgmcmc/gibbs.h"
#include "torch_sgmcmc/mclmc.h"
#include "torch_sgmcmc/predictive.h"
#include "torch_sgmcmc/psgld.h"
#include "torch_sgmcmc/sampler.h"
#include "torch_sgmcmc/sbps.h"
#include "torch_sgmcmc/seeds.h"
#include "torch_sgmcmc/sghmc.h"
#include "torch_sgmcmc/sgld.h"
#include "torch_sgmcmc/sglrw.h"
#include "torch_sgmcmc/sgnht.h"
#include "torch_sgmcmc/state_dict.h"
#include "torch_sgmcmc/store.h"
