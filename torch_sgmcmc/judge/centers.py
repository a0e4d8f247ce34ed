"""From where gauges measure positions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_sgmcmc.chain.dtypes import state_dtype
from torch_sgmcmc.chain.prior import PRIOR_MEAN

__all__ = ["centers_of"]


def centers_of(
    center: Iterable[Tensor | float] | str | None,
    sampler: Optimizer,
    params: list[Tensor],
) -> list[Tensor] | None:
    """A tensor for each parameter, in the type of arithmetic."""
    if center is None:
        return None
    if isinstance(center, str):
        if center == "current":
            center = [p.detach().clone() for p in params]
        elif center == PRIOR_MEAN:
            center = [
                sampler.state.get(p, {}).get(PRIOR_MEAN, group[PRIOR_MEAN])
                for group in sampler.param_groups
                for p in group["params"]
            ]
        else:
            raise ValueError(
                f"Invalid center: {center!r} (must be 'current' or '{PRIOR_MEAN}')"
            )
    given = list(center)
    if len(given) != len(params):
        raise ValueError(
            f"Invalid center: {len(given)} (must be one for each of the {len(params)} "
            "parameters)"
        )
    centers = []
    for i, (c, p) in enumerate(zip(given, params, strict=True)):
        value = torch.as_tensor(c, dtype=state_dtype(p), device=p.device).detach()
        if value.dim() > 0 and value.shape != p.shape:
            raise ValueError(
                f"Invalid center: number {i} has shape {list(value.shape)} (must be "
                f"{list(p.shape)}, or a number)"
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"Invalid center: number {i} is not finite")
        centers.append(torch.empty_like(p, dtype=state_dtype(p)).copy_(value))
    return centers
