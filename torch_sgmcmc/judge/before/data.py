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
    if data is None or indices is None:
        return None
    if _draws_batches(indices):
        return indices.num_data
    if isinstance(indices, SequentialSampler | RandomSampler | DistributedSampler):
        return data
    # Such as a SubsetRandomSampler's.
    chosen = length_of(indices)
    return data if not chosen else min(chosen, data)


def _indices_of(loader: Any) -> Any:
    """What draws single data, or batches of this library's; None if not known."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        batches = getattr(loader, "sampler", None)  # of a loader that has no batches
    return batches if _draws_batches(batches) else getattr(batches, "sampler", None)


def _draws_batches(sampler: Any) -> bool:
    """Whether it is one of this library's."""
    return hasattr(sampler, "num_drawn") and hasattr(sampler, "num_data")


def look_at_data(
    sampler: Sampler, loader: Any, rows: int | None, width: int
) -> list[Problem]:
    """Whether ``num_data`` is the loader's, and minibatches are as they must be.

    With the rows of a minibatch, and the targets of a datum that the loss is a mean of.
    """
    found = []
    data, batches = data_of(loader), length_of(loader)
    given = {float(group["num_data"]) for group in sampler.param_groups}
    for number in sorted(given):
        if data is None or number in (data, width * data):
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
    if isinstance(sampler, SBPS) and batches != 1:
        depends = isinstance(indices, SequentialSampler) or (
            isinstance(indices, RandomSampler) and not indices.replacement
        )
        if depends:
            found.append(
                Problem(
                    "dependent minibatches",
                    "SBPS needs minibatches that are independent of each other, and "
                    "those of a shuffled or ordered epoch are not: give the DataLoader "
                    "batch_sampler=IndependentBatchSampler(num_data, batch_size).",
                )
            )
    return found
