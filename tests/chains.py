"""Runs many chains of a sampler at once and checks them against their exact law.

Real samplers and mutants (``mutants.py``) go through these functions alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from tests.kernel import double_well_law
from tests.methods import Coordinates, Law, Method
from tests.statistics import Array, check_counts, check_gaussian, check_mean, whiten
from tests.targets import DoubleWell, GaussianMean, Quadratic

__all__ = [
    "Group",
    "Run",
    "check_double_well",
    "check_stationary",
    "check_transient",
]

# Bias left by the start after burn-in, relative to the start's distance; standard
# errors are above 1e-3 everywhere.
_FORGOTTEN = 1e-5

_DEFAULTS = {
    "num_data": 1.0,
    "prior_precision": 0.0,
    "temperature": 1.0,
    "momentum": 0.0,
    "noise_estimate": 0.0,
    "resample_momentum_every": 0,
}


@dataclass(frozen=True)
class Group:
    """A param group: parameters of so many coordinates, and settings of its own."""

    widths: tuple[int, ...]
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A sampler with its target and settings, to be run as independent chains.

    Args:
        method: the sampler.
        target: what is sampled.
        settings: keyword arguments of the sampler; those of ``method`` are added.
        groups: how the coordinates are spread over param groups and parameters;
            default: one group, coordinates halved between two parameters.
        chains: number of independent replicates.
        seed: of the sampler and of the gradient noise.
        dtype: of the parameters.
    """

    method: Method
    target: Quadratic | GaussianMean | DoubleWell
    settings: Mapping[str, Any]
    groups: tuple[Group, ...] = ()
    chains: int = 20_000
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def dimension(self) -> int:
        return 1 if isinstance(self.target, DoubleWell) else len(self.target.centre)

    @property
    def all_settings(self) -> dict[str, Any]:
        return {**self.method.settings, **self.settings}

    @property
    def all_groups(self) -> tuple[Group, ...]:
        if self.groups:
            return self.groups
        half = self.dimension // 2
        widths = (half, self.dimension - half) if half else (1,)
        return (Group(widths),)

    @property
    def coordinates(self) -> Coordinates:
        """Every number that the sampler was given, for each coordinate."""
        shared = {**_DEFAULTS, **self.all_settings}
        return {
            name: np.concatenate(
                [
                    np.full(sum(g.widths), float(g.settings.get(name, value)))
                    for g in self.all_groups
                ]
            )
            for name, value in shared.items()
            if not isinstance(value, str)
        }

    def label(self, what: str) -> str:
        return f"{self.method.name} {self.all_settings}, {what}"

    def states(self, start: Array, state: Sequence[str] = ()) -> Iterator[Array]:
        """The chains' states [chains, θ and the named state] after each update."""
        params: list[torch.Tensor] = []
        groups: list[dict[str, Any]] = []
        for group in self.all_groups:
            members = []
            for width in group.widths:
                first = sum(p.shape[1] for p in params)
                row = torch.as_tensor(start[first : first + width], dtype=self.dtype)
                members.append(row.repeat(self.chains, 1).requires_grad_())
                params.append(members[-1])
            groups.append({"params": members, **group.settings})
        sampler = self.method.build(groups, seed=self.seed, **self.all_settings)
        # A generator of its own kind: no noise of a sampler comes from here.
        generator = torch.Generator().manual_seed(0xE0 + self.seed)
        while True:
            sampler.zero_grad()
            self.target.loss(torch.cat(params, dim=1), generator).backward()
            sampler.step()
            yield _Snapshot(sampler, params, state)


class _Snapshot:
    """The state of all chains, copied only if it is asked for."""

    def __init__(
        self, sampler: Optimizer, params: list[torch.Tensor], state: Sequence[str]
    ) -> None:
        self.sampler, self.params, self.state = sampler, params, state

    def numpy(self) -> Array:
        tensors = [p.detach() for p in self.params]
        for name in self.state:
            tensors += [self.sampler.state[p][name] for p in self.params]
        return torch.cat(tensors, dim=1).double().numpy()
