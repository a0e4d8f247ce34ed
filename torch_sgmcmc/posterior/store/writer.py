"""Writes draws of tensors by name, one after another."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.posterior.store.dtypes import DTYPES, name_of

__all__ = ["NoWriter", "SampleWriter"]


class SampleWriter:
    """Appends draws to a chain of a :class:`SampleStore`: one writer for each chain.

    It returns from :meth:`append` when the draw is on the disk. :class:`Collector`
    chooses what is written, and writes beside training.

    Args:
        path: the store's folder, which is made if need be.
        tensors: a draw, for names, shapes and dtypes; it is not stored.
        chain: >= 0; processes that write at once write different chains. Default: 0.
        dtype: in which floating-point tensors are stored; None is their own. Default:
            None.

    Raises:
        ValueError: the store is of another model, or there is nothing to store.
        RuntimeError: the folder cannot be written, or another writer has the chain.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, Tensor],
        *,
        chain: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        layout = _C.DrawLayout(
            [
                (name, name_of(stored_in(t, dtype)), list(t.shape))
                for name, t in tensors.items()
            ]
        )
        self.path = os.path.abspath(path)
        self._writer = _C.ChainWriter(self.path, chain, layout)
        self.chain = chain

    def __len__(self) -> int:
        return self._writer.num_draws

    @property
    def names(self) -> list[str]:
        """The tensors' names, as they lie in a draw's file."""
        return [name for name, _, _ in self._writer.layout.tensors]

    @property
    def last_step(self) -> int | None:
        """The step of the last draw; None if there is none."""
        last = self._writer.last
        return None if last is None else last.step

    def blank(self) -> dict[str, Tensor]:
        """Memory for a draw, in the order and the dtypes of its file."""
        return {
            name: torch.empty(shape, dtype=DTYPES[dtype])
            for name, dtype, shape in self._writer.layout.tensors
        }

    def append(
        self,
        draw: Mapping[str, Tensor],
        *,
        step: int,
        number: int | None = None,
        lr: float = math.nan,
        temperature: float = 1.0,
        weight: float = 1.0,
        loss: float = math.nan,
        prior_precision: Sequence[float] = (),
    ) -> None:
        """Stores a draw, on the disk when this returns.

        Args:
            draw: the tensors, of the shapes of the first; others are left out.
            step: the sampler's step.
            number: more than that of the last draw; None is one more.
            lr: step size.
            temperature: T.
            weight: in averages; may be negative.
            loss: any number that belongs to the draw.
            prior_precision: λ of each param group.

        Raises:
            ValueError: a tensor is missing or of another shape, or there are draws of
                an earlier run: :meth:`cut_back` or :meth:`restart` comes first.
            RuntimeError: the draw cannot be written. The store is as before.
        """
        self.write(copied(draw, self.blank()), record(locals(), self._next(number)))

    def write(self, tensors: Mapping[str, Tensor], record: _C.DrawRecord) -> None:
        """Stores what has been copied into :meth:`blank`."""
        self._writer.append(record, [t.data_ptr() for t in tensors.values()])

    def thin(self, interval: int) -> None:
        """Drops the draws whose number is no multiple of the interval."""
        self._writer.thin(interval)

    def check(self) -> None:
        """Raises a ValueError if there are draws of an earlier run."""
        self._writer.check()

    def checkpoint(self) -> dict[str, int]:
        """Where the chain is, for :meth:`cut_back`.

        Files of draws that are dropped from now on stay until the next call but one.
        """
        size, crc32 = self._writer.checkpoint()
        return {"size": size, "crc32": crc32}

    def cut_back(self, position: Mapping[str, int]) -> None:
        """Deletes what was stored after a checkpoint.

        Raises:
            ValueError: the checkpoint is not of this chain, which is as before.
        """
        lost = self._writer.cut_back(position["size"], position["crc32"])
        if lost:
            warnings.warn(
                f"draws {lost} of chain {self.chain} of {self.path} were dropped after "
                "this checkpoint, and deleted as there were later ones",
                stacklevel=2,
            )

    def restart(self) -> None:
        """Deletes all draws of the chain, for a run that begins anew."""
        self._writer.restart()

    def close(self) -> None:
        """Lets other writers have the chain."""
        self._writer.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _next(self, number: int | None) -> int:
        if number is not None:
            return number
        last = self._writer.last
        return 1 if last is None else last.number + 1


class NoWriter:
    """That of a chain which another rank stores."""

    def __len__(self) -> int:
        return 0

    def checkpoint(self) -> None:
        """There is nothing to cut back."""

    def cut_back(self, position: object) -> None:
        """Does nothing."""

    def restart(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def record(values: Mapping[str, Any], number: int) -> _C.DrawRecord:
    """What the index says of a draw."""
    numbers = {
        key: _number(values[key]) for key in ("lr", "temperature", "weight", "loss")
    }
    return _C.DrawRecord(
        number=number,
        step=values["step"],
        prior_precision=[_number(value) for value in values["prior_precision"]],
        **numbers,
    )


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def stored_in(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype on disk."""
    convert = dtype is not None and tensor.is_floating_point()
    return dtype if convert else tensor.dtype  # type: ignore[return-value]


@torch.no_grad()
def copied(draw: Mapping[str, Tensor], into: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies a draw's tensors."""
    for name, memory in into.items():
        tensor = draw.get(name)
        if tensor is None or tensor.shape != memory.shape:
            found = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
            raise ValueError(
                f"Invalid draw: {found} for {name!r} (must have the shape "
                f"{list(memory.shape)})"
            )
    for name, memory in into.items():
        memory.copy_(draw[name])
    return into
