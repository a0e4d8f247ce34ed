"""Whose elements are which in the noise stream.

Note [Numbers of elements]
Noise is a function of (seed, step, purpose, element). Each parameter has a range of
elements of its own: ``offsets`` says where it begins, ``sizes`` how long it is, and
``next_offset``, of the whole sampler, where nothing has ever been numbered. A parameter
that grows would reach into its neighbour's range, and two independent coordinates would
share their noise: a step looks at sizes, and :func:`renumber` gives what has changed a
range behind all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.checks import check_integer

if TYPE_CHECKING:
    from torch_sgmcmc.sampler import Sampler

__all__ = ["NEXT", "OFFSETS", "SIZES", "check_numbers", "number", "renumber", "unlike"]

#: Keys of a group: where each of its parameters begins, how many elements it has, and,
#: equal in all groups, the first one that was never used.
OFFSETS, SIZES, NEXT = "offsets", "sizes", "next_offset"

_MOST = 2**62  # C++ has 64 bits to add to it


def _end(offset: int, size: int) -> int:
    """The first multiple of the noise block at or after offset + size."""
    block = _C.NOISE_BLOCK
    return (offset + size + block - 1) // block * block


def number(sampler: Sampler, group: dict[str, Any], begin: int) -> int:
    """Numbers all parameters of a group from here on; returns where the next begin."""
    sizes = [sampler._numel_of_chain(p) for p in group["params"]]
    offsets = []
    for size in sizes:
        offsets.append(begin)
        begin = _end(begin, size)
    group[OFFSETS], group[SIZES] = offsets, sizes
    return begin


def unlike(sampler: Sampler, group: dict[str, Any]) -> RuntimeError:
    """The error of a step with parameters that are not as they were numbered."""
    name, params, sizes = type(sampler).__name__, group["params"], group[SIZES]
    at = next(i for i, g in enumerate(sampler.param_groups) if g["params"] is params)
    if len(params) != len(sizes):
        what = f"{len(params)} parameters in group {at}, whose noise is numbered for "
        what += f"{len(sizes)}"
    else:
        now = map(sampler._numel_of_chain, params)
        i, new, old = next(
            (i, new, old)
            for i, (new, old) in enumerate(zip(now, sizes, strict=True))
            if new != old
        )
        what = f"a parameter of {new} elements, number {i} of group {at}, whose noise "
        what += f"is numbered for {old}"
    return RuntimeError(
        f"{name} got {what}: call renumber() after parameters have grown, shrunk or "
        "been replaced (further ones come with add_param_group)"
    )


def renumber(sampler: Sampler) -> bool:
    """See :meth:`Sampler.renumber`; returns whether something has changed."""
    groups = sampler.param_groups
    params = [p for group in groups for p in group["params"]]
    if len({id(p) for p in params}) < len(params):
        raise ValueError("Invalid parameters: one is listed twice")
    for p in params:
        sampler._check_parameter(p)
        for key, value in sampler.state.get(p, {}).items():
            if isinstance(value, Tensor) and value.shape != p.shape:
                raise ValueError(
                    f"Invalid state: {key} of shape {list(value.shape)} for a "
                    f"parameter of shape {list(p.shape)} (put one of its shape into "
                    f"state[p][{key!r}], or delete it to begin anew)"
                )
    sampler._check_memory()
    begin = groups[0][NEXT]
    changed = False
    for group in groups:
        sizes = [sampler._numel_of_chain(p) for p in group["params"]]
        if len(sizes) != len(group[SIZES]):
            begin, changed = number(sampler, group, begin), True
            continue
        # Other lists: those that are left may be in a state dict.
        offsets = list(group[OFFSETS])
        for i, (new, old) in enumerate(zip(sizes, group[SIZES], strict=True)):
            if new != old:
                offsets[i], begin, changed = begin, _end(begin, new), True
        group[OFFSETS], group[SIZES] = offsets, sizes
    for group in groups:
        group[NEXT] = begin
    known = set(params)
    for p in [p for p in sampler.state if isinstance(p, Tensor) and p not in known]:
        del sampler.state[p]
        changed = True
    return changed


def check_numbers(sampler: Sampler, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises if saved ranges are not those of the sampler's groups, or overlap."""
    ranges = []
    for i, (saved, group) in enumerate(zip(groups, sampler.param_groups, strict=True)):
        sizes = [sampler._numel_of_chain(p) for p in group["params"]]
        for key in ("params", SIZES, OFFSETS):
            if len(saved[key]) != len(sizes):
                raise ValueError(
                    f"Invalid state_dict: param group {i} has {len(saved[key])} "
                    f"{key if key == OFFSETS else 'parameters'}, expected {len(sizes)}"
                )
        if list(saved[SIZES]) != sizes:
            raise ValueError(
                f"Invalid state_dict: param group {i} was saved for parameters of "
                f"other sizes ({saved[SIZES]}, expected {sizes})"
            )
        for offset, size in zip(saved[OFFSETS], sizes, strict=True):
            check_integer(OFFSETS, offset, high=_MOST)
            if offset % _C.NOISE_BLOCK:
                raise ValueError(
                    f"Invalid offsets: {offset} in param group {i} (must be a multiple "
                    f"of {_C.NOISE_BLOCK})"
                )
            if size > 0:
                ranges.append((offset, _end(offset, size)))
    end = check_integer(NEXT, groups[0][NEXT], high=_MOST)
    if end % _C.NOISE_BLOCK:
        raise ValueError(
            f"Invalid {NEXT}: {end} (must be a multiple of {_C.NOISE_BLOCK})"
        )
    ranges.sort()
    following = [*(begin for begin, _ in ranges[1:]), end]
    for (begin, last), limit in zip(ranges, following, strict=False):
        if last > limit:
            raise ValueError(
                f"Invalid offsets: elements [{begin}, {last}) reach beyond {limit} "
                f"(each parameter needs its own, before {NEXT} = {end})"
            )
