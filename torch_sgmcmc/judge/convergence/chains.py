"""Chains that are not independent of each other, or do not move."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor

__all__ = ["check_different", "identical_chains", "is_still", "shared_noise"]

# Fewest draws of chains whose increments are compared; the correlation that counts,
# and how many standard deviations it is above those at other lags.
_FEWEST, _CORRELATION, _SIGMAS = 20, 0.1, 8.0


def is_still(chain: Tensor) -> bool:
    """Returns whether draws [draws, ...] are all the same."""
    return len(chain) > 1 and bool((chain == chain[:1]).all())


def identical_chains(chains: Mapping[int, Tensor]) -> list[tuple[int, int]]:
    """Finds pairs of chains, not at rest, that are equal, or become so.

    One seed brings chains of one mode together from wherever they begin.
    """
    found = []
    for i, j in combinations(chains, 2):
        length = min(len(chains[i]), len(chains[j]))
        part = slice(0 if length < 4 else 3 * length // 4, length)
        one, other = chains[i][part], chains[j][part]
        if length and torch.equal(one[-1], other[-1]) and torch.equal(one, other):
            if not is_still(chains[i]):
                found.append((i, j))
    return found


def check_different(name: str, chains: Tensor) -> None:
    """Raises if two of [chains, draws, ...] are the same, and not at rest."""
    for i, j in identical_chains(dict(enumerate(chains))):
        raise ValueError(
            f"Invalid {name}: chains {i} and {j} are identical, number for number "
            "(were they run with one seed? R-hat and effective sample sizes need "
            "independent chains: give each its own seed, with torch_sgmcmc.fold_in)"
        )


def shared_noise(chains: Mapping[int, Tensor]) -> list[tuple[int, int]]:
    """Finds pairs of chains whose increments go together, draw by draw.

    The correlation of second differences, which no common drift has, is compared with
    those at other lags, which have the same law in independent chains.

    Args:
        chains: of each chain [draws, elements], from the first draw on.
    """
    length = min(map(len, chains.values()), default=0)
    if length < _FEWEST:
        return []
    signs, spectra = {}, {}
    for i, chain in chains.items():
        bends = chain[:length].double().diff(n=2, dim=0)
        # Signs against heavy tails, and every element alike.
        signs[i] = (bends / bends.abs().mean(0).clamp_min(1e-300)).tanh()
        spectra[i] = torch.fft.rfft(signs[i], 2 * len(bends), dim=0)
    found = []
    for i, j in combinations(chains, 2):
        product = (spectra[i].conj() * spectra[j]).sum(1)
        norm = (signs[i].square().sum() * signs[j].square().sum()).sqrt()
        by_lag = torch.fft.irfft(product, 2 * (length - 2)) / norm.clamp_min(1e-300)
        reach = length // 2 - 1  # other lags, up to a half of the draws
        others = torch.cat([by_lag[3:reach], by_lag[-reach:-2]])
        if float(by_lag[0]) > max(_CORRELATION, _SIGMAS * float(others.std())):
            found.append((i, j))
    return found
