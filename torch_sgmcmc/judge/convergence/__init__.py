"""Convergence of chains: their draws for ArviZ, and its numbers of many quantities."""

from torch_sgmcmc.judge.convergence.export import to_arviz
from torch_sgmcmc.judge.convergence.report import Convergence

__all__ = ["Convergence", "to_arviz"]
