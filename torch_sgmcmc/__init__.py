"""Stochastic-gradient MCMC as torch optimizers: a posterior instead of a point."""

from torch_sgmcmc.precision import GammaPrecision
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sghmc import SGHMC
from torch_sgmcmc.sgld import SGLD
from torch_sgmcmc.version import __version__

__all__ = ["SGHMC", "SGLD", "GammaPrecision", "Sampler", "__version__"]
