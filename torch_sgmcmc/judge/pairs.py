"""What pairs of gradients at one place tell of heating."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.dtypes import state_dtype
from torch_sgmcmc.chain.prior import away_from_mean
from torch_sgmcmc.sampler import Sampler

__all__ = ["Pairs"]


class Pairs:
    """Heating as pairs of gradients at the same θ tell it, a row for each pair."""

    def __init__(self) -> None:
        # [tensors, 2]: the minibatches' part, the length of steps.
        self._rows: list[Tensor] = []

    @torch.no_grad()
    def add(
        self, sampler: Sampler, first: list[Tensor | None], second: list[Tensor | None]
    ) -> None:
        """Takes in the gradients of two minibatches, of all parameters."""
        parts = []
        ours = ((g, p) for g in sampler.param_groups for p in g["params"])
        for (group, p), a, b in zip(ours, first, second, strict=True):
            if a is None or b is None or p.numel() == 0:
                parts.append(torch.full((2,), math.nan))
                continue
            away = away_from_mean(sampler.state, group, p).to(state_dtype(p))
            prior = group["prior_precision"] / group["num_data"] * away
            a, b = a.to(prior) + prior, b.to(prior) + prior
            weighted = b - a, b
            if "square_average" in sampler.state.get(p, {}):
                root = sampler.state[p]["square_average"].sqrt()
                weighted = tuple(x / (root + group["eps"]) for x in weighted)
            sums = torch.stack(
                [((b - a) * weighted[0]).sum() / 2, (a * weighted[1]).sum()]
            )
            lr, momentum = group["lr"], group.get("momentum", 0.0)
            scale = lr * group["num_data"] / (2 * group["temperature"] * p.numel())
            over = torch.tensor([1 - momentum, 1 + momentum], dtype=torch.float64)
            parts.append(scale * sums.cpu().double() / over)
        self._rows.append(torch.stack([x.double() for x in parts]))

    def parts(self) -> Tensor:
        """Means over pairs; the second one is no less than 0."""
        means = torch.stack(self._rows).mean(0)
        means[:, 1].clamp_(min=0)
        return means

    def drift(self) -> tuple[float, bool]:
        """Heating by the length of steps, in that by minibatches, and if it is seen."""
        series = _C.BatchMeans()
        rows = torch.stack(self._rows).nan_to_num()
        for row in rows.tolist():
            series.add(sum(length for _, length in row))
        noise = float(rows[:, :, 0].sum(1).mean())
        return series.mean / max(noise, 1e-300), series.mean > 6 * series.error

    def error(self, weights: Tensor) -> float:
        """The standard error of their weighted sum."""
        series = _C.BatchMeans()
        for row in self._rows:
            series.add(float(row.sum(1).nan_to_num() @ weights))
        return series.error
