"""Chains for those who have no training loop of their own."""

from torch_sgmcmc.posterior.driver.chain import ChainState
from torch_sgmcmc.posterior.driver.sample import sample

__all__ = ["ChainState", "sample"]
