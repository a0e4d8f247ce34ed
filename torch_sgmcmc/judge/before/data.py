"""Which data a loader goes through, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from torch_sgmcmc.chain.lengths import length_of
from torch_sgmcmc.judge.before.outcome import Problem
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sbps import SBPS

__all__ = ["data_of", "halves", "look_at_data", "rows_of"]


def rows_of(batch: Any) -> int | None:
    """The rows of a minibatch: those of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    if isinstance(batch, list | tuple):
        for part in batch:
            if (rows := rows_of(part)) is not None:
                return rows
    return None


def halves(batch: Any) -> tuple[Any, Any, Any] | None:
    """Its two halves and both together; None if it cannot be cut."""
    rows = rows_of(batch)
    if rows is None or rows < 2:
        return None
    half = rows // 2

    def first(t: Tensor) -> Tensor:
        return t[:half]

    def second(t: Tensor) -> Tensor:
        return t[half : 2 * half]

    def both(t: Tensor) -> Tensor:
        return t[: 2 * half]

    return (
        _cut(batch, rows, first),
        _cut(batch, rows, second),
        _cut(batch, rows, both),
    )


def _cut(batch: Any, rows: int, part: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return part(batch) if batch.dim() and len(batch) == rows else batch
    if isinstance(batch, Mapping):
        return {key: _cut(value, rows, part) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [_cut(value, rows, part) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*values)
        return tuple(values) if isinstance(batch, tuple) else values
    return batch


def data_of(loader: Any) -> int | None:
    """How many data it goes through, of all ranks together; None if not known."""
    if isinstance(loader, list | tuple):
        rows = [rows_of(batch) for batch in loader]
        return None if None in rows else sum(rows)  # type: ignore[arg-type]
    data = length_of(getattr(loader, "dataset", None))
    indices = getattr(loader, "sampler", None)
    if data is None or isinstance(indices, DistributedSampler):
        return data
    if isinstance(indices, SequentialSampler | RandomSampler):
        return data
    # Such as a SubsetRandomSampler's. That of a batch_sampler is not used.
    chosen = length_of(indices)
    return data if chosen is None or chosen == 0 else min(chosen, data)


def look_at_data(sampler: Sampler, loader: Any, rows: int | None) -> list[Problem]:
    """Whether ``num_data`` is the loader's, and minibatches are as they must be."""
    found = []
    data, batches = data_of(loader), length_of(loader)
    given = {float(group["num_data"]) for group in sampler.param_groups}
    for number in sorted(given):
        if data is None or number == data:
            continue
        what = f"and the loader has {data:,} data"
        if number == rows and rows != data:
            what = f"the size of a minibatch, {what}"
        elif number == batches:
            what = f"the number of minibatches, {what}"
        weaker = "flatter" if number < data else "narrower"
        factor = max(number, data) / max(min(number, data), 1e-300)
        found.append(
            Problem(
                "num_data",
                f"num_data is {number:,.10g}, {what}: the log-likelihood is "
                f"{factor:.3g} times {weaker} than meant. Set num_data={data} (for a "
                "colder or hotter posterior, temperature=).",
            )
        )
    indices = getattr(loader, "sampler", None)
    is_one = batches == 1
    if isinstance(sampler, SBPS) and not is_one:
        depends = isinstance(indices, SequentialSampler) or (
            isinstance(indices, RandomSampler) and not indices.replacement
        )
        if depends and not _draws_batches(loader):
            found.append(
                Problem(
                    "dependent minibatches",
                    "SBPS needs minibatches that are independent of each other, and "
                    "those of a shuffled or ordered epoch are not: give the DataLoader "
                    "batch_sampler=IndependentBatchSampler(num_data, batch_size).",
                )
            )
    return found


def _draws_batches(loader: Any) -> bool:
    """Whether it has a batch sampler that is not torch's, over its sampler."""
    return not hasattr(getattr(loader, "batch_sampler", None), "sampler")
