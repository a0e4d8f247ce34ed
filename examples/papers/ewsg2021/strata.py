"""Stratified minibatches over k-means clusters: CP-SGHMC is SGHMC with them.

T. Fu and Z. Zhang, CPSG-MCMC: Clustering-Based Preprocessing method for Stochastic
Gradient MCMC, AISTATS 2017.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.cluster import KMeans, MiniBatchKMeans
from torch import Tensor

import torch_sgmcmc as sg

__all__ = ["StratifiedBatches", "cluster"]


class StratifiedBatches:
    r"""Independent minibatches that represent every stratum of the data.

    Of a stratum of :math:`N_k` data a minibatch of n has :math:`n N_k / N`, drawn
    uniformly without replacement, rounded up or down at random. Each datum is in a
    minibatch with probability n / N, so that the plain mean over a minibatch is
    unbiased.

    Args:
        strata: the stratum of each datum: N integers, any values.
        batch_size: n, in [1, N].
        seed: key of the draws.
    """

    def __init__(self, strata: Tensor, batch_size: int, seed: int) -> None:
        labels = torch.as_tensor(strata)
        self.batch_size, self.seed = batch_size, seed
        #: Number of minibatches drawn so far.
        self.num_drawn = 0
        self._order = torch.argsort(labels, stable=True)
        self._sizes = torch.unique(labels, return_counts=True)[1]
        self._ends = self._sizes.cumsum(0)

    def draw(self, count: int) -> Tensor:
        """Draws minibatches, as int64 indices [count, n] in the order of the strata."""
        g = torch.Generator().manual_seed(sg.fold_in(self.seed, self.num_drawn))
        self.num_drawn += count
        n, num_data = self.batch_size, len(self._order)
        # Systematic sampling: ticks at a distance N / n, all shifted by the same
        # uniform amount, of which each stratum gets as many as it spans.
        shift = torch.randint(num_data, (count, 1), generator=g)
        ticks = (n * self._ends + shift) // num_data
        places = torch.arange(n).expand(count, n).contiguous()
        stratum = torch.searchsorted(ticks, places, right=True)
        size = self._sizes[stratum]
        begin = self._ends[stratum] - size

        def draws() -> Tensor:
            uniform = torch.rand(count, n, generator=g, dtype=torch.float64)
            return begin + (uniform * size).long()

        index = draws()
        # All data of a stratum are treated alike, so that repeating the draws of data
        # that are there already leaves all subsets equally likely.
        while True:
            ordered, place = index.sort(dim=1, stable=True)
            again = torch.zeros_like(index, dtype=torch.bool)
            again.scatter_(1, place[:, 1:], ordered[:, 1:] == ordered[:, :-1])
            if not bool(again.any()):
                return self._order[index]
            index = torch.where(again, draws(), index)

    def state_dict(self) -> dict[str, int]:
        """Returns the seed and the number of minibatches drawn."""
        return {"seed": self.seed, "num_drawn": self.num_drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned."""
        self.seed, self.num_drawn = state_dict["seed"], state_dict["num_drawn"]


def cluster(x: Tensor, num_strata: int, seed: int) -> Tensor:
    """Returns the cluster of each row of x, by k-means."""
    kind = KMeans if len(x) <= 10_000 else MiniBatchKMeans
    clusters = kind(num_strata, n_init=3, random_state=seed)
    labels = clusters.fit_predict(x.flatten(1).double().cpu().numpy())
    return torch.as_tensor(labels, dtype=torch.int64)
