"""Chains that are one chain, of which no diagnostic can say anything."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

__all__ = ["check_different"]


def check_different(name: str, chains: Tensor) -> None:
    """Raises if two of [chains, draws, ...] are the same, and not at rest."""
    for i, j in combinations(range(len(chains)), 2):
        if not torch.equal(chains[i, -1], chains[j, -1]):  # nearly always enough
            continue
        if torch.equal(chains[i], chains[j]) and (chains[i] != chains[i, :1]).any():
            raise ValueError(
                f"Invalid {name}: chains {i} and {j} are identical, number for number "
                "(were they run with one seed? R-hat and effective draws need "
                "independent chains: give each a seed of its own, with "
                "torch_sgmcmc.fold_in)"
            )
