"""Have several chains converged? Their draws for ArviZ, and what a report says."""

from torch_sgmcmc.judge.convergence.export import to_arviz
from torch_sgmcmc.judge.convergence.report import Convergence

__all__ = ["Convergence", "to_arviz"]
