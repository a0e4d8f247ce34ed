"""Minibatches whose order follows from a seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch_sgmcmc.seeds import fold_in

__all__ = ["Minibatches"]


class Minibatches:
    """Endless passes over a loader, each in an order of its own.

    torch's default generator is seeded at the start of every epoch, from which loaders
    shuffle; so are generators that a loader was given, and this library's batch
    samplers. A place is thus found again by reading an epoch up to it. A DataLoader's
    workers begin anew with each epoch, ``persistent_workers`` or not.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._batches: Iterator[Any] | None = None
        self.epoch, self.position = 0, 0

    def move_to(self, epoch: int, position: int) -> None:
        """Goes to a place, given by full passes and the minibatches of one."""
        self.epoch, self.position = epoch, 0
        self._batches = None
        for _ in range(position):
            self.next()

    def next(self) -> Any:
        """The next minibatch, which may be the first of an epoch."""
        if self._batches is None:
            self._batches = self._begin()
        try:
            batch = next(self._batches)
        except StopIteration:
            if self.position == 0:
                raise ValueError(
                    "Invalid loader: it has no minibatch (an iterator is read but "
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
        # Persistent workers have the random numbers of the epochs before, and an
        # iterator that is used again draws others than a new one.
        self.close()
        seed = fold_in(self._seed, self.epoch)
        if torch.cuda.is_initialized():
            torch.manual_seed(seed)
        else:  # which would note where it is called for each kind of device: 1 ms
            torch.default_generator.manual_seed(seed)
        for owner in (
            self._loader,
            getattr(self._loader, "sampler", None),
            getattr(self._loader, "batch_sampler", None),
        ):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            if hasattr(owner, "set_epoch"):  # that of torch's DistributedSampler
                owner.set_epoch(self.epoch)
            if hasattr(owner, "load_state_dict") and hasattr(owner, "num_drawn"):
                owner.load_state_dict({"seed": seed, "num_drawn": 0, "position": 0})
        return iter(self._loader)
