"""The control variates of HMC-ECS: which expansion, and its sums over all data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.ecs.likelihood_graph import Closure
from torch_sgmcmc.ecs.taylor import (
    CONSTANT,
    LINEAR,
    PREDICTOR,
    WHOLE,
    TaylorSums,
    has_hessian,
    has_rows,
)

__all__ = ["kept_of", "sum_up", "sums_of"]


def sum_up(
    closure: Closure,
    params: list[Tensor],
    chunks: Callable[[], Iterable[Tensor]],
    probe: Tensor,
    *,
    control_variate: int,
    with_hessian: bool,
) -> TaylorSums:
    """The sums over all data, around the parameters as they are."""
    low = CONSTANT if control_variate == 0 else LINEAR
    second = PREDICTOR if has_rows(closure) else WHOLE
    form = second if with_hessian else low
    sums = TaylorSums.at_present(closure, params, chunks(), form, probe)
    sums.form = sums.form if control_variate == 2 else low
    if sums.form == CONSTANT:  # the Hessian is the mass matrix's alone
        sums.gradient = torch.zeros_like(sums.gradient)
    return sums


def kept_of(sums: TaylorSums) -> dict[str, Any]:
    """What is kept of the sums, in the sampler's state."""
    kept = vars(sums).copy()
    if not has_hessian(sums.form):
        kept["hessian"] = None
    return kept


def sums_of(kept: dict[str, Any]) -> TaylorSums:
    """The sums of what is kept of all data."""
    names = [field.name for field in dataclasses.fields(TaylorSums)]
    return TaylorSums(**{name: kept[name] for name in names})
