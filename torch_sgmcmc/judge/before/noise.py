"""The heat of minibatch noise, and the lr that it allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sgmcmc.baoa import BAOA
from torch_sgmcmc.chain.dtypes import state_dtype
from torch_sgmcmc.chain.group_settings import noise_estimate
from torch_sgmcmc.psgld import PSGLD
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sghmc import SGHMC
from torch_sgmcmc.sgld import SGLD

__all__ = ["HEAT", "NoiseHeat", "is_heat_known"]

#: The part of T that minibatches may add at ``NoiseHeat.largest_lr``.
HEAT = 0.05

Gradients = Sequence[Tensor | None]


def is_heat_known(sampler: Sampler) -> bool:
    """Returns whether a closed form gives the heat of this sampler's settings."""
    for group in sampler.param_groups:
        if not group["temperature"] > 0:
            return False
        if isinstance(group.get("noise_estimate", 0.0), str):
            return False
        if isinstance(sampler, PSGLD) and (
            group["adapt"]
            or any(
                p.requires_grad and "square_average" not in sampler.state.get(p, {})
                for p in group["params"]
            )
        ):
            return False
    return isinstance(sampler, SGLD | SGHMC | BAOA | PSGLD)


@dataclass(frozen=True)
class NoiseHeat:
    """T_kin / T - 1 of each tensor, as pairs of gradients at the same θ tell."""

    #: lr N V / (2 (1 - m) T), proportional to lr; NaN without gradients.
    minibatches: tuple[float, ...]
    #: The part that the noise estimate takes off, proportional to lr.
    estimates: tuple[float, ...]
    #: Coordinates of each tensor.
    sizes: tuple[int, ...]
    #: Of the group with the largest one.
    lr: float

    @classmethod
    def of(
        cls, sampler: Sampler, pairs: Sequence[tuple[Gradients, Gradients]]
    ) -> NoiseHeat:
        """Returns the means over pairs of minibatches, parameters in their order."""
        rows = [_minibatch_heats(sampler, *pair) for pair in pairs]
        estimates, sizes, factors = [], [], []
        for group in sampler.param_groups:
            momentum = group.get("momentum", 0.0)
            # BAOA's friction is 2 (1 - m) / (1 + m).
            factor = (1 + momentum) / 2 if isinstance(sampler, BAOA) else 1.0
            known = "noise_estimate" in group
            taken = noise_estimate(group) / (1 - momentum) if known else 0.0
            for p in group["params"]:
                factors.append(factor)
                estimates.append(factor * taken)
                sizes.append(p.numel())
        means = [
            factor * sum(heats) / len(heats)
            for factor, heats in zip(factors, zip(*rows, strict=True), strict=True)
        ]
        lr = max(float(group["lr"]) for group in sampler.param_groups)
        return cls(tuple(means), tuple(estimates), tuple(sizes), lr)

    @property
    def tensors(self) -> list[float]:
        """Heat of each tensor; NaN without gradients."""
        return [
            heat - taken
            for heat, taken in zip(self.minibatches, self.estimates, strict=True)
        ]

    @property
    def mean(self) -> float:
        """Heat of the mean coordinate."""
        return self._mean(self.tensors)

    @property
    def largest_lr(self) -> float:
        """The largest group's lr at which the mean heat is :data:`HEAT`.

        Infinite without noise, NaN where it is not known. Groups keep their ratios.
        """
        heat = self._mean(self.tensors)
        if self.lr == 0 or math.isnan(heat):
            return math.nan
        return math.inf if heat <= 0 else self.lr * HEAT / heat

    def _mean(self, values: Sequence[float]) -> float:
        """Returns the mean over coordinates of tensors with gradients."""
        total, count = 0.0, 0
        for value, heat, size in zip(values, self.minibatches, self.sizes, strict=True):
            if not math.isnan(heat):
                total, count = total + value * size, count + size
        return total / count if count else math.nan


@torch.no_grad()
def _minibatch_heats(
    sampler: Sampler, first: Gradients, second: Gradients
) -> list[float]:
    """Returns lr N V / (2 (1 - m) T) of each tensor, V = ‖g₁ - g₂‖² / (2d)."""
    heats = []
    ours = ((g, p) for g in sampler.param_groups for p in g["params"])
    for (group, p), a, b in zip(ours, first, second, strict=True):
        if a is None or b is None or p.numel() == 0:
            heats.append(math.nan)
            continue
        difference = b.to(state_dtype(p)) - a.to(state_dtype(p))
        weighted = difference
        if "square_average" in sampler.state.get(p, {}):
            root = sampler.state[p]["square_average"].sqrt()
            weighted = difference / (root + group["eps"])
        variance = float((difference * weighted).double().sum()) / (2 * p.numel())
        heat = group["lr"] * group["num_data"] * variance / (2 * group["temperature"])
        heats.append(float(heat) / (1 - group.get("momentum", 0.0)))
    return heats
