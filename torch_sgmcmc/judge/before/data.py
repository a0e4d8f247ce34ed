"""Which data a loader goes through, and how."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from torch_sgmcmc.chain.lengths import length_of
from torch_sgmcmc.chain.rows import rows_of
from torch_sgmcmc.judge.before.outcome import Problem
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sbps import SBPS

__all__ = ["data_of", "look_at_data"]


def data_of(loader: Any) -> int | None:
    """How many data it goes through, of all ranks together; None if not known."""
    if isinstance(loader, list | tuple):
        rows = [rows_of(batch) for batch in loader]
        return None if None in rows else sum(rows)  # type: ignore[arg-type]
    data = length_of(getattr(loader, "dataset", None))
    indices = _indices_of(loader)
    if data is None or isinstance(indices, DistributedSampler):
        return data
    if isinstance(indices, SequentialSampler | RandomSampler):
        return data
    # Such as a SubsetRandomSampler's. That of a batch_sampler is not used.
    chosen = length_of(indices)
    return data if chosen is None or chosen == 0 else min(chosen, data)


def _indices_of(loader: Any) -> Any:
    """What draws single data; that of a loader without batches draws minibatches."""
    indices = getattr(loader, "sampler", None)
    if getattr(loader, "batch_size", 1) is None and loader.batch_sampler is None:
        return getattr(indices, "sampler", None)
    return indices


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
    indices = _indices_of(loader)
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
