"""Whose elements are which in the noise stream.

Note [Numbers of elements]
Noise is a function of (seed, step, purpose, element). Each parameter has a range of
elements of its own: ``offsets`` says where it begins, ``sizes`` how long it is, and
``next_offset``, of the whole sampler, where nothing has ever been numbered. A parameter
that grows would reach into its neighbour's range, and two independent coordinates would
share their noise: a step looks at sizes, and :meth:`Sampler.renumber` gives what has
changed a range behind all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.checks import check_integer

__all__ = ["NEXT", "OFFSETS", "SIZES", "check_numbers", "number", "renumber"]

#: Keys of a group: where each of its parameters begins, how many elements it has, and,
#: equal in all groups, the first one that was never used.
OFFSETS, SIZES, NEXT = "offsets", "sizes", "next_offset"

_MOST = 2**62  # C++ has 64 bits to add to it


def _end(offset: int, size: int) -> int:
    """The first multiple of the noise block at or after offset + size."""
    block = _C.NOISE_BLOCK
    return (offset + size + block - 1) // block * block


def number(group: dict[str, Any], sizes: list[int], begin: int) -> int:
    """Numbers all parameters of a group from here on; returns where the next begin."""
    offsets = []
    for size in sizes:
        offsets.append(begin)
        begin = _end(begin, size)
    group[OFFSETS], group[SIZES] = offsets, sizes
    return begin


def renumber(groups: list[dict[str, Any]], numel: Callable[[Tensor], int]) -> bool:
    """Gives what has changed its size new elements; returns whether anything has."""
    begin = groups[0][NEXT]
    changed = False
    for group in groups:
        sizes = [numel(p) for p in group["params"]]
        if len(sizes) != len(group[SIZES]):
            begin, changed = number(group, sizes, begin), True
            continue
        # Other lists: those that are left may be in a state dict.
        offsets = list(group[OFFSETS])
        for i, (new, old) in enumerate(zip(sizes, group[SIZES], strict=True)):
            if new != old:
                offsets[i], begin, changed = begin, _end(begin, new), True
        group[OFFSETS], group[SIZES] = offsets, sizes
    for group in groups:
        group[NEXT] = begin
    return changed


def check_numbers(
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    numel: Callable[[Tensor], int],
) -> None:
    """Raises if saved ranges are not those of the sampler's groups, or overlap."""
    ranges = []
    for i, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        sizes = [numel(p) for p in group["params"]]
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
    end = check_integer(NEXT, saved_groups[0][NEXT], high=_MOST)
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
