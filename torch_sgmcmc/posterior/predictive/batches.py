"""Inputs in batches that can be read again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torch_sgmcmc.chain.checks import check_integer
from torch_sgmcmc.chain.rows import tensors_in

__all__ = ["Batches"]

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# So many numbers of a batch tell it from another.
_PROBED = 64


class Batches:
    """The batches of inputs, the same ones in the same order at each pass.

    Args:
        name: the argument that they are, for messages.
        inputs: a Tensor, a mapping from names to Tensors with as many rows, or an
            iterable of batches that can be read again.
        batch_size: rows of a batch, if it is not the inputs that have batches.
        in_order: refuse what is shuffled.

    Raises:
        TypeError: an iterator, which can be read once only, or no iterable.
        ValueError: no inputs, or shuffled ones.
    """

    def __init__(
        self, name: str, inputs: Any, batch_size: int, *, in_order: bool
    ) -> None:
        self._name = name
        self._size = check_integer("batch_size", batch_size, low=1)
        self._in_order = in_order
        self._probes: list[Tensor | None] | None = None
        self._inputs: Iterable[Any] | None = None
        #: The first batch of the last pass.
        self.first: Any = None
        inputs = _as_tensor(inputs)
        if isinstance(inputs, Tensor):
            if inputs.dim() == 0 or len(inputs) == 0:
                raise ValueError(
                    f"Invalid {name}: shape {list(inputs.shape)} (there is no input)"
                )
            self._inputs = inputs.split(self._size)
        elif isinstance(inputs, Mapping):
            self._inputs = self._split(inputs)
        if self._inputs is not None:
            self._in_order = False  # there is nothing to look after
            return
        if isinstance(inputs, Iterator):
            raise TypeError(
                f"Invalid {name}: an iterator of type {type(inputs).__name__} (is read "
                "once for each draw: give a list or a DataLoader)"
            )
        if isinstance(inputs, tuple) or not isinstance(inputs, Iterable):
            raise TypeError(
                f"Invalid {name}: of type {type(inputs).__name__} (must be a Tensor, a "
                "mapping from names to Tensors, or a list or DataLoader of batches)"
            )
        if in_order and isinstance(getattr(inputs, "sampler", None), _SHUFFLING):
            raise ValueError(
                f"Invalid {name}: a DataLoader that shuffles (rows of predictions are "
                "in the order of the inputs: shuffle=False)"
            )
        self._inputs = inputs

    def __iter__(self) -> Iterator[Any]:
        assert self._inputs is not None
        count = 0
        probes: list[Tensor | None] = []
        for batch in self._inputs:
            if self._in_order:
                probes.append(_probe(batch))
                if self._probes is not None:
                    self._compare(probes)
            if count == 0:
                self.first = batch
            yield batch
            count += 1
        if count == 0:
            raise ValueError(f"Invalid {self._name}: there is no batch")
        if not self._in_order:
            return
        if self._probes is not None and count < len(self._probes):
            raise self._differ(f"{count} batches, and {len(self._probes)} before")
        self._probes = probes

    def _compare(self, probes: list[Tensor | None]) -> None:
        assert self._probes is not None
        number, probe = len(probes), probes[-1]
        if number > len(self._probes):
            raise self._differ(f"batch {number}, and {len(self._probes)} before")
        before = self._probes[number - 1]
        if probe is None or before is None:
            return
        same = probe.shape == before.shape and bool(
            ((probe == before) | ((probe != probe) & (before != before))).all()
        )
        if not same:
            raise self._differ(f"batch {number} is another than before")

    def _differ(self, how: str) -> ValueError:
        return ValueError(
            f"Invalid {self._name}: other batches at another pass: {how} (they must "
            "be the same in the same order, without shuffling and augmentation)"
        )

    def _split(self, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = {
            len(value)
            for value in inputs.values()
            if isinstance(value, Tensor) and value.dim()
        }
        if len(rows) != 1 or not all(isinstance(v, Tensor) for v in inputs.values()):
            raise ValueError(
                f"Invalid {self._name}: a mapping with values of {sorted(rows)} rows "
                "(must be Tensors of as many rows each)"
            )
        (count,) = rows
        return [
            {key: value[i : i + self._size] for key, value in inputs.items()}
            for i in range(0, count, self._size)
        ]


def _as_tensor(inputs: Any) -> Any:
    """Returns an array or a data frame as a Tensor, others as they are.

    Floating-point numbers get torch's default dtype, as models have it.
    """
    if isinstance(inputs, Tensor | Mapping) or not hasattr(inputs, "__array__"):
        return inputs
    array = inputs.__array__()
    if array.dtype.kind not in "fiub":
        raise TypeError(
            f"Invalid inputs: an array of dtype {array.dtype} (must have numbers)"
        )
    tensor = torch.from_numpy(array.copy())
    return tensor.to(torch.get_default_dtype()) if array.dtype.kind == "f" else tensor


def _probe(batch: Any) -> Tensor | None:
    """Some numbers of the first tensor in a batch."""
    for tensor in tensors_in(batch):
        flat = tensor.reshape(-1)
        return flat[:: max(1, len(flat) // _PROBED)].clone()
    return None
