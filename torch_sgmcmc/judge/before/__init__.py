"""A look before: is what will be sampled what is meant?"""

from torch_sgmcmc.judge.before.check import check
from torch_sgmcmc.judge.before.outcome import Check, Problem

__all__ = ["Check", "Problem", "check"]
