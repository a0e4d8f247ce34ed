"""The control variates of HMC-ECS: which expansion, its sums, and those of some data.

What is made of all data at θ* is kept in a dict of tensors, numbers and strings, which
goes into the sampler's state as it is; what is kept of some data depends on ``form``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.ecs.gauss_newton import (
    GAUSS_NEWTON,
    GaussNewtonTerms,
    gauss_newton_sums,
)
from torch_sgmcmc.ecs.likelihood_graph import Closure
from torch_sgmcmc.ecs.taylor import (
    CONSTANT,
    LINEAR,
    PREDICTOR,
    RANK_ONE,
    WHOLE,
    TaylorSums,
    TaylorTerms,
    has_hessian,
    has_rows,
)

__all__ = [
    "Terms",
    "expand",
    "kept_of",
    "sum_up",
    "sums_of",
    "terms_of",
]

Terms = TaylorTerms | GaussNewtonTerms


def sum_up(
    closure: Closure,
    params: list[Tensor],
    chunks: Callable[[], Iterable[Tensor]],
    probes: Tensor,
    *,
    control_variate: int | str,
    with_hessian: bool,
) -> TaylorSums:
    """The sums over all data, around the parameters as they are.

    Raises:
        TypeError: the closure does not show its outputs, which are needed.
    """
    if control_variate == "gauss-newton":
        return gauss_newton_sums(closure, params, chunks())
    low = CONSTANT if control_variate == 0 else LINEAR
    forms = (PREDICTOR,) if has_rows(closure) else (RANK_ONE, WHOLE)
    for form in forms if with_hessian else (low,):
        sums = TaylorSums.at_present(closure, params, chunks(), form, probes)
        if sums is not None:
            sums.form = sums.form if control_variate == 2 else low
            if sums.form == CONSTANT:  # the Hessian is the mass matrix's alone
                sums.gradient = torch.zeros_like(sums.gradient)
            return sums
    raise AssertionError("whole Hessians fit any model")


def expand(
    closure: Closure, params: list[Tensor], indices: Tensor, form: str, probe: Tensor
) -> Terms:
    """The expansions of the data with these indices, around θ*.

    Args:
        closure: gives log-likelihoods at the parameters, which are at θ*.
        params: the parameters.
        indices: of the data.
        form: of the expansions.
        probe: a random direction, always the same.
    """
    if form == GAUSS_NEWTON:
        return GaussNewtonTerms.at_present(closure, params, indices)
    return TaylorTerms.at_present(closure, params, indices, form, probe)


def terms_of(form: str, fields: Sequence[Tensor | None]) -> Terms:
    """The expansions whose ``fields()`` these are."""
    kind = GaussNewtonTerms if form == GAUSS_NEWTON else TaylorTerms
    return kind(*fields)  # type: ignore[arg-type]


def kept_of(sums: TaylorSums) -> dict[str, Any]:
    """What is kept of the sums over all data."""
    kept = vars(sums).copy()
    if not has_hessian(sums.form):
        kept["hessian"] = None
    return kept


def sums_of(kept: dict[str, Any]) -> TaylorSums:
    """The sums of what is kept of all data."""
    names = [field.name for field in dataclasses.fields(TaylorSums)]
    return TaylorSums(**{name: kept[name] for name in names})
