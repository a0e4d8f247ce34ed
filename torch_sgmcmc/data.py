"""Minibatches: independent draws, passes over a loader, and closures with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.hyperparams import (
    check_flag,
    check_integer,
    draw_seed,
    wrong_shape,
)
from torch_sgmcmc.core.random_state import fold_in
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Takes, needs_graph, traits_of
from torch_sgmcmc.core.state_dict import check_keys, plain_number, saved_number


class IndependentBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Uniform minibatches that are independent of each other.

    Use it in :class:`torch.utils.data.DataLoader` in place of ``shuffle=True``, whose
    minibatches depend on each other: samplers that rely on independent noise then
    sample another law. A minibatch of n data takes O(n) time and memory.

    Args:
        num_data: N, the number of data, >= 1.
        batch_size: n, in [1, N], or with ``replacement`` >= 1.
        replacement: whether a datum can be in a minibatch several times. Without
            replacement, the noise variance of a minibatch's mean is smaller by the
            factor 1 - n/N. Default: False.
        num_batches: length of one iteration, >= 1. Every iteration continues with new
            draws. Default: N / n, rounded up.
        seed: key of the draws, a 64-bit int. None draws one from torch's default
            generator. A sampler may have the same seed. Default: None.
        num_replicas: D >= 1 data-parallel ranks that share each minibatch, n / D data
            each, n a multiple of D. They have one seed. Default: 1.
        rank: this rank, in [0, D). It gets the data at the places rank, rank + D, ...
            of the minibatch, so that all ranks together have one process's minibatch.
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
        :meth:`state_dict` resumes bitwise identically, also in the middle of an
        iteration, but counts minibatches that a loader drew ahead as used: with
        ``num_workers`` > 0, and accelerate's. It does not depend on the rank, so any
        number of ranks can resume. More: docs/samplers/minibatch.md.
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
        check_flag("replacement", replacement)
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
        self._resumes = False  # whether the next iteration starts there

    def _rows(self, step: int, count: int) -> Tensor:
        memory = _C.minibatches(
            self.num_data,
            self.batch_size,
            count=count,
            replacement=self.replacement,
            seed=self.seed,
            step=step,
            num_replicas=self.num_replicas,
            rank=self.rank,
        )
        flat = torch.frombuffer(memory, dtype=torch.int64)
        return flat.view(count, self.batch_size // self.num_replicas)

    def at(self, numbers: Any) -> Tensor:
        """Returns the minibatches of these numbers, in any order, also repeated.

        Number k is the k-th minibatch of :meth:`draw`, from 0; nothing counts as drawn.
        For :attr:`EWSG.minibatches`.

        Args:
            numbers: whole numbers in [0, 2^48), at least one: a tensor, or a list.

        Returns:
            A row for each, as from :meth:`draw`.
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

        For data in memory, and for samplers of several chains (``num_chains``), each of
        which gets its own minibatch.

        Args:
            count: number of minibatches, >= 1.

        Returns:
            int64 indices of shape [count, batch_size], or with replicas [count,
            batch_size / num_replicas].
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
        """Returns the seed, the number of drawn minibatches, and the position."""
        return {
            "seed": saved_number(self.seed),
            "num_drawn": saved_number(self.num_drawn),
            "position": self._position % self.num_batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`.

        The next iteration makes the rest of the interrupted one, with the same
        minibatches.

        Raises:
            ValueError: an entry is missing or out of range. Nothing has been loaded.
        """
        keys = ("seed", "num_drawn", "position")
        check_keys(state_dict, type(self).__name__, *keys)
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


def one_gradient_a_step(sampler: Sampler) -> bool:
    """Returns whether each step takes one minibatch."""
    return traits_of(sampler).takes is Takes.GRADIENT


def closure_of(
    sampler: Sampler, loss: Callable[[], Tensor]
) -> Callable[[], Tensor | float]:
    """Returns the closure for the step of any sampler except HMCECS.

    ``loss()`` draws a minibatch and returns its mean loss; for SBPS, each example's.
    """
    takes = traits_of(sampler).takes
    if takes is Takes.SUBSAMPLES:
        raise TypeError(
            "Invalid sampler: HMCECS draws its own subsamples by index (make a loop of "
            "its steps, and collect with Collector)"
        )
    if takes is Takes.EXAMPLES:
        return loss

    def backward() -> Tensor:
        if one_gradient_a_step(sampler):  # other samplers clear gradients
            sampler.zero_grad()
        torch.clear_autocast_cache()
        value = loss()
        value.backward(create_graph=needs_graph(sampler))
        return value.detach()

    return backward


@torch.enable_grad()
def new_gradients(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[torch.nn.Module, Any], Tensor],
    model: torch.nn.Module,
    batch: Any,
) -> Any:
    """Computes gradients of a minibatch's mean loss; returns the loss."""
    torch.clear_autocast_cache()
    optimizer.zero_grad()
    value = loss(model, batch).mean()
    value.backward()
    return value.detach()


def seed_generators(seed: int) -> None:
    """Seeds the default generators of torch, NumPy and Python."""
    if torch.cuda.is_initialized():
        torch.manual_seed(seed)
    else:  # torch.manual_seed records its caller for each device: 1 ms
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed([seed % 2**32, seed // 2**32 % 2**32])


def generator_states() -> dict[str, Any]:
    """Returns the states of these generators on the CPU, as a checkpoint holds them."""
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)  # as legacy asks
    kind, words, *rest = state
    return {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(words.astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def set_generator_states(states: Mapping[str, Any] | Tensor) -> None:
    """Restores these states; earlier checkpoints have torch's alone, a Tensor."""
    if isinstance(states, Tensor):
        states = {"torch": states}
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        kind, words, *rest = states["numpy"]
        np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
        random.setstate(states["python"])


@contextmanager
def kept_generators(seed: int | None = None) -> Iterator[None]:
    """Restores these generators at the end, and seeds them before."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    before = generator_states()
    with torch.random.fork_rng(devices):
        try:
            if seed is not None:
                seed_generators(seed)
            yield
        finally:
            set_generator_states(before)


def samplers_of(loader: Any) -> list[Any]:
    """Returns a loader's samplers of rows and of batches, and those inside of them."""
    owners = [loader]
    for owner in owners:  # which grows
        for name in ("sampler", "batch_sampler"):
            each = getattr(owner, name, None)
            if each is not None and not any(each is known for known in owners):
                owners.append(each)
    return owners[1:]


class Minibatches:
    """Endless passes over a loader, each in another reproducible order.

    At the start of every epoch, seeds are set in the default generators of torch, NumPy
    and Python, in generators that a loader was given, and in this library's batch
    samplers. A place is found again by reading an epoch up to it. A DataLoader's
    workers restart with each epoch, with ``persistent_workers`` too.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._batches: Iterator[Any] | None = None
        self.epoch, self.position = 0, 0

    def move_to(self, epoch: int, position: int) -> None:
        """Moves to a place, given by full passes and minibatches of the next pass."""
        self.epoch, self.position = epoch, 0
        self._batches = None
        for _ in range(position):
            self.next()

    def next(self) -> Any:
        """Returns the next minibatch, perhaps the first of an epoch."""
        if self._batches is None:
            self._batches = self._begin()
        try:
            batch = next(self._batches)
        except StopIteration:
            if self.position == 0:
                raise ValueError(
                    "Invalid loader: it has no minibatch (an iterator can be read only "
                    "once: give a list or a DataLoader)"
                ) from None
            self.epoch, self.position = self.epoch + 1, 0
            self._batches = self._begin()
            return self.next()
        self.position += 1
        return batch

    def close(self) -> None:
        """Ends the pass in progress and its worker processes."""
        self._batches = None
        if getattr(self._loader, "persistent_workers", False):
            self._loader._iterator = None

    def _begin(self) -> Iterator[Any]:
        # Persistent workers keep random numbers of earlier epochs, and a reused
        # iterator draws other numbers than a new one.
        self.close()
        seed = fold_in(self._seed, self.epoch)
        seed_generators(seed)
        owner: Any
        for owner in (self._loader, *samplers_of(self._loader)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            if hasattr(owner, "set_epoch"):  # torch's DistributedSampler
                owner.set_epoch(self.epoch)
            if hasattr(owner, "load_state_dict") and hasattr(owner, "num_drawn"):
                owner.load_state_dict({"seed": seed, "num_drawn": 0, "position": 0})
        return iter(self._loader)


def parts_of(batch: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Returns a minibatch's tensors, and a function that reassembles it."""
    if isinstance(batch, Tensor):
        return [batch], lambda parts: parts[0]
    if isinstance(batch, dict) and all(isinstance(t, Tensor) for t in batch.values()):
        keys = list(batch)
        return [*batch.values()], lambda parts: dict(zip(keys, parts, strict=True))
    if isinstance(batch, tuple | list) and all(isinstance(t, Tensor) for t in batch):
        named = getattr(type(batch), "_make", None)
        return [*batch], named or (list if isinstance(batch, list) else tuple)
    raise TypeError(
        f"Invalid loader: a minibatch is a {type(batch).__name__} (must be, for "
        "compiled blocks, a Tensor, or a tuple, list or dict of Tensors)"
    )


def stacked(batches: list[Any]) -> list[Tensor]:
    """Returns the parts of minibatches of one shape, each in one tensor."""
    columns = zip(*(parts_of(batch)[0] for batch in batches), strict=True)
    rows = [list(column) for column in columns]
    for tensors in rows:
        sizes = {tuple(t.shape) for t in tensors}
        if len(sizes) > 1:
            raise ValueError(
                f"Invalid loader: minibatches of shapes {sorted(sizes)} in one "
                "compiled block (must be of one: drop_last=True)"
            )
    return [torch.stack(tensors) for tensors in rows]
