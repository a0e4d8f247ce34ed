"""Writes draws of tensors by name, in files of many small draws or one large."""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.losses import Likelihood
from torch_sgmcmc.posterior.store import SampleStore, folder_of
from torch_sgmcmc.posterior.store_files import (
    COLUMNS,
    NAMES,
    DrawFile,
    FolderChain,
    MemoryChain,
    StoreInfo,
    check_plain,
    checksums,
)

__all__ = ["SampleWriter"]

# A file is written at so many bytes or draws, or seconds after its first draw.
_BYTES, _DRAWS, _SECONDS = 4 << 20, 1024, 30.0

_Row = tuple[dict[str, Tensor], dict[str, Any]]


class SampleWriter:
    """Appends draws to a chain of a :class:`SampleStore`: one writer for each chain.

    Draws wait in memory until they have 4 MiB or are 1,024, or one comes 30 seconds
    after the first. A thread then writes them, one file after the other. :meth:`flush`,
    :meth:`checkpoint` and :meth:`close` write all. The methods can be called from
    several threads.

    Args:
        store: a folder, which is made if missing, or a :class:`SampleStore`.
        tensors: a draw, for names, shapes and dtypes; it is not stored.
        chain: >= 0; processes that write at once write different chains. Default: 0.
        dtype: dtype of stored floating-point tensors; None keeps each tensor's.
            Default: None.
        not_sampled: tensors that are neither stored nor sampled. Their checksums are
            kept, to detect draws that are put into another model. Default: None.
        likelihood: one of :mod:`torch_sgmcmc.losses`, the default likelihood of
            predictions with the draws. Default: None.

    Raises:
        ValueError: the store has draws of another model, there is nothing to store, or
            a tensor is quantized, sparse or of a dtype that cannot be stored.
        RuntimeError: the folder cannot be written, or another writer has the chain.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | SampleStore,
        tensors: Mapping[str, Tensor],
        *,
        chain: int = 0,
        dtype: torch.dtype | None = None,
        not_sampled: Mapping[str, Tensor] | None = None,
        likelihood: Likelihood | None = None,
    ) -> None:
        if isinstance(chain, bool) or not isinstance(chain, int) or chain < 0:
            raise ValueError(f"Invalid chain: {chain!r} (must be an integer >= 0)")
        if not tensors:
            raise ValueError("Invalid tensors: there are none to store")
        self.chain, self._store = chain, store  # one in memory lives with its writer
        self._dtypes = {k: _stored_in(k, t, dtype) for k, t in tensors.items()}
        self._shapes = {k: t.shape for k, t in tensors.items()}
        self._info = StoreInfo(
            {
                name: {"dtype": NAMES[dtype], "shape": [*self._shapes[name]]}
                for name, dtype in self._dtypes.items()
            },
            checksums(not_sampled or {}),
            None if likelihood is None else likelihood.settings(),
        )
        folder = folder_of(store)
        #: The chain's files, or its memory.
        self.files: FolderChain | MemoryChain
        if isinstance(store, SampleStore) and folder is None:
            self.files = store.open_in_memory(chain, self._info)
        else:
            self.files = FolderChain(folder, chain, self._info)
        self._size = sum(
            t.numel() * self._dtypes[name].itemsize for name, t in tensors.items()
        )
        # True while draws of an earlier run await a decision of the caller.
        self._is_undecided = len(self) > 0
        self._rows: list[_Row] = []
        self._being_written: list[_Row] = []
        self._since, self._has_failed, self._is_closed = 0.0, False, False
        self._writing: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._lock, self._process = threading.RLock(), os.getpid()

    def __len__(self) -> int:
        """The number of draws that are on the disk."""
        return self.files.num_draws

    @property
    def num_waiting(self) -> int:
        """The number of draws that are in memory."""
        return len(self._rows) + len(self._being_written)

    @torch.no_grad()
    def append(
        self,
        draw: Mapping[str, Tensor],
        *,
        step: int,
        lr: float = math.nan,
        temperature: float = 1.0,
        weight: float = 1.0,
        loss: float = math.nan,
        prior_precision: Sequence[float] = (),
    ) -> None:
        """Copies a draw, which is on the disk after :meth:`flush` at the latest.

        Args:
            draw: the tensors, of the first draw's shapes; other tensors are ignored.
            step: the sampler's step.
            lr: step size.
            temperature: T.
            weight: in averages; may be negative.
            loss: any number that belongs to the draw.
            prior_precision: λ of each param group.

        Raises:
            ValueError: a tensor is missing or has another shape, or there are draws of
                an earlier run: call :meth:`cut_back` or :meth:`restart` first.
            RuntimeError: earlier draws cannot be written. They stay in memory without
                this one; the next call tries again.
        """
        self.check_draw(draw)
        numbers = {"lr": lr, "temperature": temperature, "weight": weight, "loss": loss}
        values: dict[str, Any] = {k: _number(v) for k, v in numbers.items()}
        values["step"] = int(step)
        values["prior_precision"] = [_number(value) for value in prior_precision]
        with self._lock:
            self.check()
            copies = {k: _copied(draw[k], dtype) for k, dtype in self._dtypes.items()}
            if not self._rows:
                self._since = time.monotonic()
            self._rows.append((copies, values))
            count, age = len(self._rows), time.monotonic() - self._since
            if count >= _DRAWS or count * self._size >= _BYTES or age >= _SECONDS:
                self._start_writing()

    def check_draw(self, draw: Mapping[str, Tensor]) -> None:
        """Raises a ValueError if a tensor is missing or of another shape."""
        for name, shape in self._shapes.items():
            tensor = draw.get(name)
            if tensor is None or tensor.shape != shape:
                found = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
                raise ValueError(
                    f"Invalid draw: {found} for {name!r} (must have the shape "
                    f"{list(shape)})"
                )

    def check(self) -> None:
        """Raises any error that would prevent storing the next draw.

        Raises:
            ValueError: there are draws of an earlier run.
            RuntimeError: the writer is closed or belongs to another process, or earlier
                draws still cannot be written.
        """
        place = self.files.place
        if self._process != os.getpid():
            raise RuntimeError(
                f"Cannot write to {place}: process {self._process} has opened it, and "
                "this is a fork of it (give each process its own chain)"
            )
        if self._is_closed:
            raise RuntimeError(f"Cannot write to {place}: the writer is closed")
        if self._is_undecided:
            raise ValueError(
                f"Invalid store: {place} has {len(self)} draws of an earlier run (load "
                "the state dict of its checkpoint, or restart())"
            )
        with self._lock:
            if self._writing is not None and self._writing.done():
                self._wait()
            if self._has_failed:
                self._write_rows()

    def flush(self) -> None:
        """Writes the draws that wait in memory.

        Raises:
            RuntimeError: draws cannot be written; they stay in memory.
        """
        if self._process == os.getpid():
            with self._lock:
                self._wait()
                self._write_rows()

    def checkpoint(self) -> dict[str, int]:
        """Writes waiting draws; returns the chain's position for :meth:`cut_back`."""
        with self._lock:
            self.flush()
            return self.files.position()

    def cut_back(self, position: Mapping[str, int]) -> None:
        """Deletes draws stored after a checkpoint.

        Raises:
            ValueError: the checkpoint is not of this chain, which is unchanged.
        """
        with self._lock:
            self.flush()
            self.files.cut_back(position)
            self._is_undecided = False

    def restart(self) -> None:
        """Deletes all draws of the chain, for a run that starts again."""
        with self._lock:
            self._wait()
            self._rows.clear()
            self.files.clear()
            self._is_undecided = False

    def close(self) -> None:
        """Writes waiting draws, and releases the chain for other writers.

        Raises:
            RuntimeError: draws cannot be written; the writer is closed.
        """
        if self._is_closed or self._process != os.getpid():
            return
        with self._lock:
            try:
                self.flush()
            finally:
                self._is_closed = True
                if self._thread is not None:
                    self._thread.shutdown()
                self.files.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_writing(self) -> None:
        self._wait()
        self._thread = self._thread or ThreadPoolExecutor(1, "sgmcmc-store")
        try:
            self._writing = self._thread.submit(self._write, self._rows)
        except RuntimeError:  # the ending interpreter starts no threads
            self._has_failed = True  # the next call writes
        else:
            self._being_written, self._rows = self._rows, []

    def _wait(self) -> None:
        """Waits for the thread; draws that it could not write wait again."""
        if self._writing is not None and self._writing.exception() is not None:
            self._rows = self._being_written + self._rows
            self._has_failed = True
        self._writing, self._being_written = None, []

    def _write_rows(self) -> None:
        if self._rows:
            self._write(self._rows)
            self._rows = []
        self._has_failed = False

    def _write(self, rows: Sequence[_Row]) -> None:
        draws, values = zip(*rows, strict=True)
        tensors = {
            k: torch.stack([d[k] for d in draws])
            if len(draws) > 1
            else draws[0][k][None]
            for k in self._dtypes
        }
        columns: dict[str, Sequence[Any]] = {
            name: array("q" if name == "step" else "d", [v[name] for v in values])
            for name in COLUMNS
        }
        columns["prior_precision"] = [v["prior_precision"] for v in values]
        file = DrawFile(self._info, self.chain, "", len(rows), 0, 0, columns)
        self.files.add(tensors, file)


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor)


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _stored_in(name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if name == "__metadata__":
        raise ValueError(f"Invalid tensors: {name!r} is a name that safetensors keeps")
    check_plain(name, tensor)
    stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if stored not in NAMES:
        known = ", ".join(map(str, NAMES))
        raise ValueError(f"Invalid tensors: {name!r} is {stored} (not of {known})")
    return stored
