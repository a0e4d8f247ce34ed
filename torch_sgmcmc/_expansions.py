"""The control variates of HMC-ECS: which expansion, its sums, and those of some data.

What is made of all data at θ* is kept in a dict of tensors, numbers and lists, which
goes into the sampler's state as it is; what each of the others means depends on its
``form``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from torch_sgmcmc._gauss_newton import (
    BLOCKS,
    DIAGONAL,
    BlockTerms,
    DiagonalTerms,
    GaussNewtonSums,
    Ranges,
)
from torch_sgmcmc._taylor import LINEAR, RANK_ONE, WHOLE, TaylorSums, TaylorTerms
from torch_sgmcmc.log_likelihood import LogLikelihood

__all__ = [
    "CONTROL_VARIATES",
    "MASS_MATRICES",
    "Sums",
    "Terms",
    "block_ranges",
    "check_blocks",
    "check_mass",
    "curvature",
    "expand",
    "sum_up",
    "sums_of",
    "terms_of",
]

Closure = Callable[[Tensor], Tensor]
Terms = TaylorTerms | BlockTerms | DiagonalTerms
Sums = TaylorSums | GaussNewtonSums

_GAUSS_NEWTON = ("gauss-newton", "block-diagonal", "diagonal")
CONTROL_VARIATES = (2, 1, *_GAUSS_NEWTON)
MASS_MATRICES = ("dense", "diagonal", "identity")

# Elements of a block: a matrix of 2 GiB.
_LARGEST_BLOCK = 16384


def check_blocks(blocks: object, control_variate: int | str) -> None:
    """Raises if these are no blocks, whatever the parameters may be."""
    if blocks is None:
        return
    if control_variate != "block-diagonal":
        raise ValueError(
            f"Invalid blocks: {blocks} (must be None with control_variate="
            f"{control_variate!r})"
        )
    if not isinstance(blocks, (list, tuple)) or not all(
        isinstance(block, (list, tuple))
        and all(isinstance(i, int) and not isinstance(i, bool) for i in block)
        for block in blocks
    ):
        raise TypeError(
            f"Invalid blocks: {blocks!r} (must be lists of indices of parameters)"
        )
    if not blocks:
        raise ValueError(f"Invalid blocks: {blocks} (must not be empty)")
    chosen = [i for block in blocks for i in block]
    if not all(blocks) or len(set(chosen)) < len(chosen) or min(chosen, default=0) < 0:
        raise ValueError(
            f"Invalid blocks: {blocks} (must be disjoint lists, none of them empty, of "
            "indices >= 0)"
        )


def check_mass(mass_matrix: str, control_variate: int | str) -> None:
    """Raises if the control variates do not have the Hessian for this mass."""
    if mass_matrix == "dense" and control_variate in ("block-diagonal", "diagonal"):
        raise ValueError(
            f"Invalid mass_matrix: {mass_matrix!r} (must be 'diagonal' or 'identity' "
            f"with control_variate={control_variate!r})"
        )


def block_ranges(
    control_variate: int | str,
    blocks: Sequence[Sequence[int]] | None,
    sizes: Sequence[int],
) -> Ranges:
    """Each block's ranges of elements of θ, for parameters of these sizes.

    Raises:
        ValueError: a block has parameters that there are not, or is too large.
    """
    if control_variate not in ("gauss-newton", "block-diagonal"):
        return []
    count = len(sizes)
    if control_variate == "gauss-newton":
        blocks = [range(count)]
    elif blocks is None:
        blocks = [[i] for i in range(count)]
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    result = []
    for block in blocks:
        if max(block) >= count:
            raise ValueError(
                f"Invalid blocks: {list(block)} (must be indices below {count}, the "
                "number of parameters)"
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
                f"Invalid control_variate: {control_variate!r} with a block of {size} "
                f"elements, parameters {list(block)} (must be <= {_LARGEST_BLOCK}: "
                "choose smaller blocks, or 1)"
            )
        result.append(ranges)
    return result


def sum_up(
    closure: Closure,
    params: list[Tensor],
    chunks: Callable[[], Iterable[Tensor]],
    probes: Tensor,
    *,
    control_variate: int | str,
    blocks: Ranges,
    with_hessian: bool,
) -> Sums:
    """The sums over all data, around the parameters as they are.

    Raises:
        TypeError: the closure does not show its outputs, which are needed.
    """
    if control_variate in _GAUSS_NEWTON:
        form = DIAGONAL if control_variate == "diagonal" else BLOCKS
        shown = _shown(closure, control_variate)
        return GaussNewtonSums.at_present(shown, params, chunks(), form, blocks)
    for form in (RANK_ONE, WHOLE):
        sums = TaylorSums.at_present(
            closure, params, chunks(), form, probes, with_hessian=with_hessian
        )
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
    form, d = kept["form"], len(kept["anchor"])
    if form == DIAGONAL:
        shown = _shown(closure, "diagonal")
        return DiagonalTerms.at_present(shown, params, indices, d)
    if form == BLOCKS:
        shown = _shown(closure, "block-diagonal")
        return BlockTerms.at_present(shown, params, indices, kept["blocks"])
    return TaylorTerms.at_present(closure, params, indices, form, probe)


def terms_of(kept: dict[str, Any], fields: Sequence[Tensor | None]) -> Terms:
    """The expansions whose ``fields()`` these are."""
    if kept["form"] == DIAGONAL:
        return DiagonalTerms(*fields)  # type: ignore[arg-type]
    if kept["form"] == BLOCKS:
        return BlockTerms(*fields, kept["blocks"])  # type: ignore[arg-type]
    return TaylorTerms(*fields)  # type: ignore[arg-type]


def sums_of(kept: dict[str, Any]) -> Sums:
    """The sums of what is kept of all data."""
    fields = (kept["value"], kept["gradient"], kept["hessian"])
    if kept["form"] in (BLOCKS, DIAGONAL):
        return GaussNewtonSums(*fields, kept["blocks"], kept["form"])
    return TaylorSums(*fields, kept["form"])


def _shown(closure: Closure, control_variate: int | str) -> LogLikelihood:
    if not isinstance(closure, LogLikelihood):
        raise TypeError(
            f"Invalid closure: got {type(closure).__name__} (must be a LogLikelihood "
            f"for control_variate={control_variate!r})"
        )
    return closure
