"""Checks of a set-up before it is sampled."""

from torch_sgmcmc.judge.before.check import check
from torch_sgmcmc.judge.before.messages import Problem
from torch_sgmcmc.judge.before.outcome import Check

__all__ = ["Check", "Problem", "check"]
