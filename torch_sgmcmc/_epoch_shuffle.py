"""Sees plain epoch shuffling in a closure, where it can be seen."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["warn_of_epoch_shuffle"]


def warn_of_epoch_shuffle(name: str, closure: Callable[[], Any]) -> bool:
    """Warns if the closure draws from a loader that goes through the data by epochs.

    Looked at are the variables that the function refers to. Returns whether it warned.
    """
    for value in _values(closure):
        sampler = _sampler_of(value)
        if isinstance(sampler, BatchSampler):
            sampler = sampler.sampler
        plain = isinstance(sampler, SequentialSampler) or (
            isinstance(sampler, RandomSampler) and not sampler.replacement
        )
        if plain:
            warnings.warn(
                f"The closure of {name} draws from a DataLoader that goes through the "
                f"data by epochs ({type(sampler).__name__}): the minibatches of an "
                "epoch are not independent, which biases the posterior. Give the "
                "DataLoader an IndependentBatchSampler as its batch_sampler",
                stacklevel=5,
            )
            return True
    return False


def _values(closure: Callable[[], Any]) -> Iterator[object]:
    """What a function refers to: captured, bound, default and global variables."""
    while isinstance(closure, functools.partial):
        yield from closure.args
        yield from closure.keywords.values()
        closure = closure.func
    bound = getattr(closure, "__self__", None)
    if bound is None and not hasattr(closure, "__code__"):
        bound = closure  # an object that is called
    yield from getattr(bound, "__dict__", {}).values()
    function = getattr(closure, "__func__", closure)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()
    code = getattr(function, "__code__", None)
    if code is not None:
        known = function.__globals__
        yield from (known[key] for key in code.co_names if key in known)


def _sampler_of(value: object) -> object:
    if isinstance(value, DataLoader):
        return value.batch_sampler if value.batch_sampler is not None else value.sampler
    if isinstance(value, _BaseDataLoaderIter):
        return value._index_sampler
    return None
