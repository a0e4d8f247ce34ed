"""The control variates of HMC-ECS: which expansion, its sums, and those of some data.

What is made of all data at θ* is kept in a dict of tensors, numbers and lists, which
goes into the sampler's state as it is; what each of the others means depends on its
``form``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from torch_sgmcmc.ecs.gauss_newton import (
    BLOCKS,
    DIAGONAL,
    BlockTerms,
    DiagonalTerms,
    GaussNewtonSums,
    Ranges,
)
from torch_sgmcmc.ecs.likelihood_graph import Closure
from torch_sgmcmc.ecs.log_likelihood import LogLikelihood
from torch_sgmcmc.ecs.taylor import (
    LINEAR,
    PREDICTOR,
    RANK_ONE,
    WHOLE,
    TaylorSums,
    TaylorTerms,
)

__all__ = [
    "ControlVariate",
    "Sums",
    "Terms",
    "block_ranges",
    "check_control_variate",
    "check_mass",
    "curvature",
    "expand",
    "kept_of",
    "sum_up",
    "sums_of",
    "terms_of",
]

Terms = TaylorTerms | BlockTerms | DiagonalTerms
Sums = TaylorSums | GaussNewtonSums

# 2, 1, one of the names, or blocks.
ControlVariate = int | str | Sequence[Sequence[int]]

_GAUSS_NEWTON = ("gauss-newton", "block-diagonal", "diagonal")

# Elements of a block: a matrix of 2 GiB.
_LARGEST_BLOCK = 16384


def check_control_variate(value: object) -> None:
    """Raises if there is none of this name or order, or if these are no blocks."""
    if isinstance(value, str):
        if value not in _GAUSS_NEWTON:
            wanted = " or ".join(map(repr, _GAUSS_NEWTON))
            raise ValueError(f"Invalid control_variate: {value!r} (must be {wanted})")
        return
    if not isinstance(value, (list, tuple)):
        if value not in (2, 1) or isinstance(value, bool):
            raise ValueError(f"Invalid control_variate: {value!r} (must be 2 or 1)")
        return
    if not all(
        isinstance(block, (list, tuple))
        and all(isinstance(i, int) and not isinstance(i, bool) for i in block)
        for block in value
    ):
        raise TypeError(
            f"Invalid control_variate: {value!r} (blocks must be lists of indices of "
            "parameters)"
        )
    chosen = [i for block in value for i in block]
    distinct = len(set(chosen)) == len(chosen)
    if not value or not all(value) or not distinct or min(chosen) < 0:
        raise ValueError(
            f"Invalid control_variate: {value} (blocks must be disjoint lists, none of "
            "them empty, of indices >= 0)"
        )


def check_mass(mass_matrix: str, control_variate: ControlVariate) -> None:
    """Raises if the control variates do not have the Hessian for this mass."""
    if mass_matrix == "dense" and control_variate not in (2, 1, "gauss-newton"):
        raise ValueError(
            f"Invalid mass_matrix: {mass_matrix!r} (must be 'diagonal' or 'identity' "
            f"with control_variate={control_variate!r})"
        )


def block_ranges(control_variate: ControlVariate, sizes: Sequence[int]) -> Ranges:
    """Each block's ranges of elements of θ, for parameters of these sizes.

    Raises:
        ValueError: a block has parameters that there are not, or is too large.
    """
    count = len(sizes)
    if control_variate == "gauss-newton":
        blocks: Sequence[Sequence[int]] = [range(count)]
    elif control_variate == "block-diagonal":
        blocks = [[i] for i in range(count)]
    elif isinstance(control_variate, (list, tuple)):
        blocks = control_variate
    else:
        return []
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    result = []
    for block in blocks:
        if max(block) >= count:
            raise ValueError(
                f"Invalid control_variate: a block {list(block)} (must be indices "
                f"below {count}, the number of parameters)"
            )
        ranges: list[list[int]] = []
        for i in sorted(block):
            if ranges and ranges[-1][1] == ends[i]:
                ranges[-1][1] = ends[i + 1]
            else:
                ranges.append([ends[i], ends[i + 1]])
        size = sum(end - begin for begin, end in ranges)
        if size > _LARGEST_BLOCK:
            raise ValueError(
                f"Invalid control_variate: a block of {size} elements, parameters "
                f"{list(block)} (must be <= {_LARGEST_BLOCK}: choose smaller blocks, "
                "or 1)"
            )
        result.append(ranges)
    return result


def sum_up(
    closure: Closure,
    params: list[Tensor],
    chunks: Callable[[], Iterable[Tensor]],
    probes: Tensor,
    *,
    control_variate: ControlVariate,
    blocks: Ranges,
    with_hessian: bool,
) -> Sums:
    """The sums over all data, around the parameters as they are.

    Raises:
        TypeError: the closure does not show its outputs, which are needed.
    """
    if control_variate not in (2, 1):
        form = DIAGONAL if control_variate == "diagonal" else BLOCKS
        return GaussNewtonSums.at_present(
            _shown(closure), params, chunks(), form, blocks
        )
    for form in (PREDICTOR, RANK_ONE, WHOLE) if with_hessian else (LINEAR,):
        sums = TaylorSums.at_present(closure, params, chunks(), form, probes)
        if sums is not None:
            sums.form = sums.form if control_variate == 2 else LINEAR
            return sums
    raise AssertionError("whole Hessians fit any model")


def curvature(sums: Sums) -> Tensor | None:
    """The Hessian of Σ q, [d, d] or its diagonal [d]; None if there is none."""
    if isinstance(sums, TaylorSums):
        return sums.hessian
    whole = len(sums.blocks) == 1 and len(sums.hessian[0]) == len(sums.gradient)
    return sums.hessian[0] if sums.form == BLOCKS and whole else sums.diagonal()


def expand(
    closure: Closure,
    params: list[Tensor],
    indices: Tensor,
    kept: dict[str, Any],
    probe: Tensor,
) -> Terms:
    """The expansions of the data with these indices, around θ*.

    Args:
        closure: gives log-likelihoods at the parameters, which are at θ*.
        params: the parameters.
        indices: of the data.
        kept: what is kept of all data.
        probe: a random direction, always the same.
    """
    form = kept["form"]
    if form == DIAGONAL:
        return DiagonalTerms.at_present(_shown(closure), params, indices)
    if form == BLOCKS:
        blocks = kept["blocks"]
        return BlockTerms.at_present(_shown(closure), params, indices, blocks)
    gate = kept["gate"]
    return TaylorTerms.at_present(closure, params, indices, form, probe, gate)


def terms_of(kept: dict[str, Any], fields: Sequence[Tensor | None]) -> Terms:
    """The expansions whose ``fields()`` these are."""
    if kept["form"] == DIAGONAL:
        return DiagonalTerms(*fields)  # type: ignore[arg-type]
    if kept["form"] == BLOCKS:
        return BlockTerms(*fields, kept["blocks"])  # type: ignore[arg-type]
    return TaylorTerms(*fields)  # type: ignore[arg-type]


def kept_of(sums: Sums) -> dict[str, Any]:
    """What is kept of the sums over all data."""
    kept = vars(sums).copy()
    if kept["form"] == LINEAR:
        kept["hessian"] = None
    return kept


def sums_of(kept: dict[str, Any]) -> Sums:
    """The sums of what is kept of all data."""
    kind = GaussNewtonSums if kept["form"] in (BLOCKS, DIAGONAL) else TaylorSums
    return kind(**{field.name: kept[field.name] for field in dataclasses.fields(kind)})


def _shown(closure: Closure) -> LogLikelihood:
    if not isinstance(closure, LogLikelihood):
        raise TypeError(
            f"Invalid closure: got {type(closure).__name__} (must be a LogLikelihood "
            "for Gauss-Newton control variates)"
        )
    return closure
