"""Independent minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc._impl.hyperparams import check_integer, draw_seed, wrong_shape
from torch_sgmcmc._impl.state_dict import plain_number, saved_number

__all__ = ["IndependentBatchSampler"]


class IndependentBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Minibatches that are drawn independently of each other, uniformly.

    For :class:`torch.utils.data.DataLoader`, in place of ``shuffle=True``, whose
    minibatches depend on each other: samplers that rely on independent noise lose
    their law with it. A minibatch of n data takes O(n) time and memory.

    Args:
        num_data: N, the number of data, >= 1.
        batch_size: n, in [1, N], or with ``replacement`` >= 1.
        replacement: whether a datum can be in a minibatch several times. Without, the
            noise of a minibatch's mean is smaller by the factor 1 - n/N. Default:
            False.
        num_batches: length of one iteration, >= 1. Default: N / n, rounded up.
            Every iteration goes on with new draws.
        seed: key of the draws, a 64-bit int. None draws one from torch's default
            generator. A sampler may have the same seed. Default: None.
        num_replicas: D >= 1 data-parallel ranks that share each minibatch, n / D data
            each, n a multiple of D. They have one seed. Default: 1.
        rank: which of them, in [0, D): it gets the data at the places rank, rank + D,
            ... of the minibatch, so that all ranks together have those of one process.
            Default: 0.

    Raises:
        TypeError: a number of the wrong type.
        ValueError: a number out of range.

    Example:
        >>> batches = IndependentBatchSampler(len(data), 500, seed=0)
        >>> loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
        >>> for x, y in loader:  # one "epoch"
        ...     ...
        >>> x, y = data[batches.draw(1)[0]]  # or without a loader

    Note:
        :meth:`state_dict` resumes to the bit, in the middle of an iteration too, but
        counts what a loader with ``num_workers`` > 0 drew ahead as used. It does not
        depend on the rank: any number of ranks goes on with it. More:
        docs/samplers/minibatch.md.
    """

    def __init__(
        self,
        num_data: int,
        batch_size: int,
        *,
        replacement: bool = False,
        num_batches: int | None = None,
        seed: int | None = None,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        self.num_data = check_integer("num_data", num_data, low=1)
        self.batch_size = check_integer("batch_size", batch_size, low=1)
        if not isinstance(replacement, bool):
            raise TypeError(f"Invalid replacement: {replacement!r} (must be a bool)")
        if not replacement and batch_size > num_data:
            raise ValueError(
                f"Invalid batch_size: {batch_size} (must be <= num_data = {num_data} "
                "without replacement)"
            )
        self.replacement = replacement
        if num_batches is None:
            num_batches = -(-num_data // batch_size)
        self.num_batches = check_integer("num_batches", num_batches, low=1)
        self.num_replicas = check_integer("num_replicas", num_replicas, low=1)
        self.rank = check_integer("rank", rank)
        _C.check_share(batch_size, num_replicas, rank)
        if seed is None and num_replicas > 1:
            raise ValueError(
                "Invalid seed: None (the ranks of one minibatch need one seed, the "
                "sampler's for instance: seed=sampler.seed)"
            )
        self.seed = draw_seed(seed)
        #: Number of minibatches drawn so far; the next one is keyed by it.
        self.num_drawn = 0
        self._position = 0  # in the latest iteration
        self._resumes = False  # whether the next iteration is to start there

    def _rows(self, step: int, count: int) -> Tensor:
        memory = _C.minibatches(
            *(self.num_data, self.batch_size),
            **{"count": count, "step": step, "seed": self.seed, "rank": self.rank},
            **{"replacement": self.replacement, "num_replicas": self.num_replicas},
        )
        flat = torch.frombuffer(memory, dtype=torch.int64)
        return flat.view(count, self.batch_size // self.num_replicas)

    def at(self, numbers: Any) -> Tensor:
        """The minibatches of these numbers, in any order and as often as one likes.

        Number k is the one that :meth:`draw` draws as its k-th, from 0; nothing counts
        as drawn. For :attr:`EWSG.minibatches`.

        Args:
            numbers: whole numbers in [0, 2^48), at least one: a tensor, or a list.

        Returns:
            As of :meth:`draw`, a row for each.
        """
        numbers = torch.as_tensor(numbers).cpu()
        if numbers.dim() != 1 or len(numbers) == 0:
            raise wrong_shape("numbers", numbers, "one row, not empty")
        check_integer("number", numbers.min().item())
        ends = (numbers.diff() != 1).nonzero().flatten() + 1
        runs = numbers.tensor_split(ends)
        return torch.cat([self._rows(int(run[0]), len(run)) for run in runs])

    def draw(self, count: int) -> Tensor:
        """Draws the next minibatches as one tensor of indices.

        For data in memory, and for samplers of several chains (``num_chains``), each
        of which gets a minibatch of its own.

        Args:
            count: how many minibatches, >= 1.

        Returns:
            int64 indices of shape [count, batch_size], or of replicas
            [count, batch_size / num_replicas].
        """
        count = check_integer("count", count, low=1)
        rows = self._rows(self.num_drawn, count)
        self.num_drawn += count
        return rows

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        position = self._position if self._resumes else 0
        self._resumes = False
        while position < self.num_batches:
            batch = self.draw(1)[0].tolist()
            position += 1
            self._position = position
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The seed, the number of minibatches drawn, and the place in the iteration."""
        return {
            "seed": saved_number(self.seed),
            "num_drawn": saved_number(self.num_drawn),
            "position": self._position % self.num_batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned.

        The next iteration makes the rest of the one that was going on, with the very
        minibatches that it would have had.

        Raises:
            ValueError: an entry is out of range. Nothing has been loaded.
        """
        seed = draw_seed(plain_number(state_dict["seed"]))
        num_drawn = check_integer("num_drawn", plain_number(state_dict["num_drawn"]))
        position = check_integer("position", state_dict["position"])
        if position >= self.num_batches:
            raise ValueError(
                f"Invalid position: {position} (must be below num_batches = "
                f"{self.num_batches})"
            )
        self.seed, self.num_drawn = seed, num_drawn
        self._position, self._resumes = position, True
