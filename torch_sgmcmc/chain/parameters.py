"""What a sampler can sample: one check of parameters for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from torch_sgmcmc.chain import shards
from torch_sgmcmc.chain.dtypes import DTYPES

__all__ = [
    "check_chains",
    "check_memory",
    "check_parameter",
    "name_of",
]


def check_parameter(sampler: str, p: Tensor, takes_shards: bool = True) -> None:
    """Raises if the sampler of this name cannot sample a parameter."""
    cannot = f"Invalid parameter: {sampler} cannot sample"
    if shards.is_dtensor(p):
        if not takes_shards:
            raise ValueError(
                f"{cannot} a DTensor (it decides by all parameters together: sample "
                "with one that does not, as SGHMC)"
            )
        p = shards.check_shard(cannot, p)
    if is_lazy(p):
        raise ValueError(
            f"{cannot} an uninitialized parameter (run the lazy module once before)"
        )
    if p.layout is not torch.strided or p.is_nested:
        layout = "nested" if p.is_nested else p.layout
        raise ValueError(f"{cannot} the layout {layout} (must be torch.strided)")
    if p.dtype not in DTYPES:
        raise ValueError(
            f"{cannot} {p.dtype} (must be float32, float64, bfloat16 or float16; a "
            "complex parameter can be kept as torch.view_as_real of it)"
        )
    if p.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{cannot} on the device {p.device} (must be cpu or cuda; a module on meta "
            "has no numbers before to_empty() and its initialisation)"
        )
    if p.is_neg():
        raise ValueError(f"{cannot} a negative view (take resolve_neg() of it)")
    if _may_repeat(p) and _shared_by([p]) is not None:
        raise ValueError(
            f"{cannot} an expanded parameter (several elements share memory): shape "
            f"{list(p.shape)}, strides {list(p.stride())}"
        )


def check_chains(p: Tensor, num_chains: int | None) -> None:
    """Raises if a parameter does not hold so many chains."""
    if num_chains is not None and shards.is_dtensor(p):
        raise ValueError(
            f"Invalid num_chains: {num_chains} (a DTensor belongs to one chain)"
        )
    if num_chains is not None and (p.dim() == 0 or p.shape[0] != num_chains):
        raise ValueError(
            f"Invalid parameter: shape {list(p.shape)} (must have a leading dimension "
            f"of num_chains = {num_chains})"
        )


def check_memory(groups: Iterable[Iterable[Tensor]]) -> None:
    """Raises if parameters, each without repetitions, overlap each other."""
    spans = []
    for i, params in enumerate(groups):
        for j, p in enumerate(shards.locals_of(params)):
            if p.numel() > 0 and not isinstance(p, FakeTensor):
                begin = p.data_ptr()
                end = begin + _extent(p) * p.element_size()
                spans.append((str(p.device), begin, end, (i, j), p))
    spans.sort(key=lambda span: span[:2])
    for cluster in _clusters(spans):
        # Columns of a matrix, say, interleave without sharing anything.
        shared = _shared_by([p for *_, p in cluster])
        if shared is not None:
            first, second = (
                "number {1} of group {0}".format(*place)
                for place in sorted(cluster[index][3] for index in shared)
            )
            raise ValueError(
                f"Invalid parameters: {first} and {second} overlap in memory (each "
                "must have its own)"
            )


def name_of(groups: list[dict[str, Any]], p: Tensor) -> str:
    """A sampler's parameter as errors and warnings name it."""
    for g, group in enumerate(groups):
        for i, other in enumerate(group["params"]):
            if other is p:
                names: Any = group.get("param_names")
                if names is not None:
                    return repr(names[i])
                return f"{i} of group {g}, of shape {list(p.shape)}"
    return f"of shape {list(p.shape)}"


_Span = tuple[str, int, int, tuple[int, int], Tensor]


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Those, of sorted spans, that overlap as wholes."""
    number, device, furthest = 0, "", 0
    numbered = []
    for span in spans:
        if span[0] != device or span[1] >= furthest:
            number, device, furthest = number + 1, span[0], span[2]
        furthest = max(furthest, span[2])
        numbered.append((number, span))
    for _, members in groupby(numbered, key=lambda each: each[0]):
        cluster = [span for _, span in members]
        if len(cluster) > 1:
            yield cluster


def _extent(p: Tensor) -> int:
    """The number of elements from the first in memory to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))


def _may_repeat(p: Tensor) -> bool:
    """Whether strides leave open that elements share memory."""
    extent = 1
    for s, n in sorted(zip(p.stride(), p.shape, strict=True)):
        if n > 1 and s < extent:
            return p.numel() > 0
        extent += (n - 1) * s
    return False


def _shared_by(params: list[Tensor]) -> tuple[int, int] | None:
    """The indices of two parameters that have a byte in common, if there are."""
    rows, owners = [], []
    for i, p in enumerate(params):
        offsets = torch.zeros(1, dtype=torch.int64)
        for n, s in zip(p.shape, p.stride(), strict=True):
            offsets = (offsets[:, None] + s * torch.arange(n)).flatten()
        size = p.element_size()
        bytes_ = (size * offsets)[:, None] + torch.arange(size)
        rows.append(bytes_.flatten() + (p.data_ptr() - params[0].data_ptr()))
        owners.append(torch.full_like(rows[-1], i))
    sorted_, order = torch.cat(rows).sort(stable=True)
    twice = (sorted_[1:] == sorted_[:-1]).nonzero()
    if len(twice) == 0:
        return None
    at = int(twice[0])
    owner = torch.cat(owners)[order]
    return int(owner[at]), int(owner[at + 1])
