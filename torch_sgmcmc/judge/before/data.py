"""Data of a loader: how many, in which order, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from torch_sgmcmc.chain.lengths import length_of
from torch_sgmcmc.chain.rows import rows_of, tensors_in
from torch_sgmcmc.hmc import HMC
from torch_sgmcmc.judge.before.messages import Problem, problem
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sbps import SBPS

__all__ = ["count_data", "find_num_data", "find_order"]

_OF_ALL = SequentialSampler, RandomSampler, DistributedSampler, WeightedRandomSampler
# Pairs of neighbours that are read, and the part of the mean difference between data
# that theirs has in sorted data. (Five standard deviations below 1.)
_PAIRS, _SORTED = 64, 0.3
# The ratio of unequal sizes of minibatches.
_UNEQUAL = 1.05


def count_data(loader: Any) -> int | None:
    """Returns the number of data, of all ranks together; None if it is not known."""
    if isinstance(loader, list | tuple):
        rows = [rows_of(batch) for batch in loader]
        return None if None in rows else sum(rows)  # type: ignore[arg-type]
    data = length_of(getattr(loader, "dataset", None))
    indices = _indices_of(loader)
    if data is None or indices is None:
        return None
    if _draws_batches(indices):
        return indices.num_data
    if isinstance(indices, _OF_ALL):  # whose num_samples is the length of an epoch
        return data
    # Such as a SubsetRandomSampler's.
    chosen = length_of(indices)
    return data if not chosen else min(chosen, data)


def _batch_sampler_of(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    # A loader that makes no batches has those that its sampler draws.
    return getattr(loader, "sampler", None) if batches is None else batches


def _indices_of(loader: Any) -> Any:
    """Returns what draws single data, or batches of this library; None if unknown."""
    batches = _batch_sampler_of(loader)
    return batches if _draws_batches(batches) else getattr(batches, "sampler", None)


def _draws_batches(sampler: Any) -> bool:
    return hasattr(sampler, "num_drawn") and hasattr(sampler, "num_data")


def find_num_data(
    sampler: Sampler, loader: Any, rows: int | None, widths: set[int]
) -> Iterator[Problem]:
    """Compares ``num_data`` with the loader's data.

    With the rows of a minibatch, and numbers of targets of a datum that may count.
    """
    data, batches = count_data(loader), length_of(loader)
    for number in sorted({float(group["num_data"]) for group in sampler.param_groups}):
        if data is None or number in {data - _unseen(loader), data}:
            continue
        if any(number == width * data for width in widths):
            continue
        what = f"and the loader has {data:,} data"
        if number == rows:
            what = f"the size of a minibatch, {what}"
        elif number == batches:
            what = f"the number of minibatches, {what}"
        weaker = "flatter" if number < data else "narrower"
        factor = max(number, data) / max(min(number, data), 1e-300)
        values = {"number": number, "data": data, "what": what, "factor": factor}
        yield problem("num_data", **values, weaker=weaker)


def find_order(sampler: Sampler, loader: Any, several: bool) -> Iterator[Problem]:
    """Finds minibatches that do not represent the data, or not to this sampler."""
    indices, is_in_order = _indices_of(loader), _is_in_order(loader)
    unseen, data = _unseen(loader), count_data(loader)
    given = {float(group["num_data"]) for group in sampler.param_groups}
    if data and unseen and given != {float(data - unseen)}:
        yield problem("data order/unseen", unseen=unseen, data=data)
    if not several:
        return
    if isinstance(sampler, HMC):
        yield problem("dependent minibatches/HMC")
    is_shuffled = isinstance(indices, RandomSampler) and not indices.replacement
    if isinstance(sampler, SBPS) and (is_shuffled or is_in_order):
        yield problem("dependent minibatches")
    weights = getattr(indices, "weights", ())
    if isinstance(indices, WeightedRandomSampler) and len(weights.unique()) > 1:
        yield problem("weighted data")
    if not is_in_order:
        return
    sizes = _sizes_of(loader)
    if sizes and max(sizes) > _UNEQUAL * min(sizes):
        least, most = min(sizes), max(sizes)
        ratio = most / least
        yield problem("data order/sizes", least=least, most=most, ratio=ratio)
    values = torch.tensor([*_neighbours(loader)], dtype=torch.float64).view(-1, 2)
    near = (values[:, 0] - values[:, 1]).abs().mean()
    far = (values[:, :1] - values[:, 1]).abs().mean()
    if len(values) >= _PAIRS // 2 and near < _SORTED * far:
        yield problem("data order/sorted")


def _is_in_order(loader: Any) -> bool:
    indices = _indices_of(loader)
    if isinstance(loader, list | tuple) or isinstance(indices, SequentialSampler):
        return True
    return isinstance(indices, DistributedSampler) and not indices.shuffle


def _unseen(loader: Any) -> int:
    """Returns the number of data that drop_last leaves out of every epoch."""
    batches = _batch_sampler_of(loader)
    if isinstance(loader, list | tuple) or not getattr(batches, "drop_last", False):
        return 0
    if not _is_in_order(loader):
        return 0
    return (length_of(batches.sampler) or 0) % batches.batch_size


def _sizes_of(loader: Any) -> list[int]:
    if isinstance(loader, list | tuple):
        rows = [rows_of(batch) for batch in loader]
        return [] if None in rows else rows  # type: ignore[return-value]
    batches = _batch_sampler_of(loader)
    size, data = getattr(batches, "batch_size", None), length_of(batches.sampler)
    if not size or not data or batches.drop_last or data <= size:
        return []
    return [size, data % size or size]


def _neighbours(loader: Any) -> Iterator[tuple[float, float]]:
    """Yields the targets of data that follow each other, from all places."""
    if isinstance(loader, list | tuple):
        last = [[*tensors_in(batch)][-1:] for batch in loader]
        flat = [t for ts in last for t in ts if t.dim() and t.numel() == len(t)]
        rows: Any = [value for t in flat for value in t.flatten().tolist()]
    else:
        rows = loader.dataset
    count = length_of(rows) or 0
    for i in torch.linspace(0, max(count - 2, 0), min(_PAIRS, count // 2)).long():
        pair = [_target_of(rows[int(i) + k]) for k in (0, 1)]
        if None in pair:
            return
        yield pair[0], pair[1]  # type: ignore[misc]


def _target_of(row: Any) -> float | None:
    """Returns the last entry of a datum, if it is a number."""
    row = [*row.values()] if isinstance(row, Mapping) else row
    last = row[-1] if isinstance(row, tuple | list) and len(row) > 1 else row
    if isinstance(last, Tensor) and last.numel() == 1:
        return float(last)
    return float(last) if isinstance(last, int | float) else None
