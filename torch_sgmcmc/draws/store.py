"""Stored draws of a model's parameters, and their writer."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from torch_sgmcmc.core.hyperparams import check_integer, warn, wrong_type
from torch_sgmcmc.draws import store_files
from torch_sgmcmc.draws.store_files import (
    CorruptDrawError,
    DrawFile,
    MemoryChain,
    StoreInfo,
    chains_in,
    read_index,
    read_json,
)
from torch_sgmcmc.losses import Likelihood


def folder_of(store: str | os.PathLike[str] | SampleStore) -> Path | None:
    """Returns a store's folder as an absolute path, None for a store in memory."""
    if isinstance(store, SampleStore):
        return None if store.path is None else Path(store.path)
    if not isinstance(store, str | os.PathLike):
        raise wrong_type("store", store, "a path or a SampleStore")
    return Path(os.path.abspath(os.path.expanduser(store)))


class Draw(Mapping[str, Tensor]):
    """One draw: tensors by name, read on the first access.

    The first access compares the file's checksum, and raises a CorruptDrawError if the
    file is missing, cut off or altered. Writes into a tensor stay in this object. Draws
    can be sent to other processes.

    Attributes:
        chain: number of its chain.
        step: the sampler's step that made it.
        lr: step size of the first param group; NaN if there was none.
        temperature: T of the first param group.
        weight: in averages: the collector's ``weight``, by default 1 or HMCECS's sign.
        loss: the collector's ``loss``, else NaN.
        prior_precision: λ of each param group; empty if unknown.
        not_sampled: checksums of tensors that are not stored, None of sampled ones.
        likelihood: settings of the chain's likelihood, None if unknown.
    """

    step: int
    lr: float
    temperature: float
    weight: float
    loss: float
    prior_precision: tuple[float, ...]

    def __init__(self, file: DrawFile, row: int, names: Sequence[str]) -> None:
        self._file, self._row, self._names = file, row, names
        self.chain, self.not_sampled = file.chain, file.info.not_sampled
        self.likelihood = file.info.likelihood
        for name, column in file.columns.items():
            setattr(self, name, column[row])
        self._tensors: dict[str, Tensor] | None = None

    def __repr__(self) -> str:
        return f"Draw(chain={self.chain}, step={self.step}, {len(self)} tensors)"

    # Not a Mapping's, which compares tensors.
    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def path(self) -> Path | None:
        """The file in the format of safetensors; None for a store in memory."""
        return Path(self._file.path) if self._file.path else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tensors": None}

    def read_run(self) -> dict[str, Any] | None:
        """Returns the record kept beside the chain's draws, or None."""
        if self.path is None:
            return self._file.run or None
        return read_json(self.path.with_name("run.json"))

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        if self._tensors is None:
            found = self._file.read()
            tensors = {key: found[key][self._row] for key in self._names}
            if self._file.tensors:  # which other draws read too
                tensors = {key: tensor.clone() for key, tensor in tensors.items()}
            self._tensors = tensors
        return self._tensors[name]


class Draws(Sequence[Draw]):
    """Draws of one or several chains, in the order of chains and steps.

    ``draws[i]`` is a :class:`Draw`, ``draws[i:j]`` are some of them, ``draws[name]``
    and ``draws[names]`` all of them with these tensors alone. None of these reads a
    tensor.
    """

    def __init__(self, rows: list[tuple[DrawFile, int]], names: Sequence[str]) -> None:
        self._rows, self._names = rows, names
        #: Settings of the chains' likelihood, None if unknown.
        self.likelihood = rows[0][0].info.likelihood if rows else None

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        more = ", ..." if len(self.names) > 3 else ""
        some = ", ".join(map(repr, self.names[:3])) + more
        return f"{len(self)} draws of chains {self.chains}: {some or 'no tensor'}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Returns the one tensor of ``draws[name]`` for all draws, [draws, ...]."""
        if len(self.names) != 1:
            raise TypeError(
                "Invalid draws: an array is of one tensor, and they have "
                f"{len(self.names)} (draws[name] has one)"
            )
        (name,) = self.names
        values = torch.stack([draw[name] for draw in self])
        if values.dtype == torch.bfloat16:  # NumPy has none
            values = values.float()
        return values.numpy() if dtype is None else values.numpy().astype(dtype)

    @overload
    def __getitem__(self, index: int) -> Draw: ...
    @overload
    def __getitem__(self, index: slice | str | Iterable[str]) -> Draws: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Draws(self._rows[index], self._names)
        if hasattr(index, "__index__"):
            file, row = self._rows[index]
            return Draw(file, row, self._names)
        names = [index] if isinstance(index, str) else list(index)
        for name in names:
            if name not in self._names:
                raise KeyError(f"no draw has {name!r} (they have {self.names})")
        return Draws(self._rows, tuple(names))

    @property
    def names(self) -> list[str]:
        """Names of the tensors; empty without draws."""
        return [*self._names] if self._rows else []

    @property
    def chains(self) -> list[int]:
        """Numbers of the chains that have draws."""
        return sorted({file.chain for file, _ in self._rows})

    def chain(self, chain: int) -> Draws:
        """Returns the draws of one chain; raises a ValueError if there are none."""
        rows = [row for row in self._rows if row[0].chain == chain]
        if not rows:
            raise ValueError(f"Invalid chain: {chain!r} (must be in {self.chains})")
        return Draws(rows, self._names)

    def intact(self) -> Draws:
        """Returns the draws whose files are intact; reads all files.

        A UserWarning names each damaged file and its damage.
        """
        damaged = set()
        for file in dict.fromkeys(file for file, _ in self._rows):
            try:
                file.read()
            except CorruptDrawError as error:
                warnings.warn(str(error), stacklevel=2)
                damaged.add(file)
        return Draws([row for row in self._rows if row[0] not in damaged], self._names)


class SampleStore(Draws):
    """Draws of a model's parameters, of one or several chains, on disk or in memory.

    A folder of safetensors files, with an index of JSON lines for each chain that
    describes each draw (docs/store.md). C++ writes and reads the same files. A store
    can be opened while a :class:`Collector` or :class:`SampleWriter` writes to it, and
    shows the draws of the time when it was opened or last refreshed.

    Args:
        path: the folder; a missing one has no draws. None keeps draws in the memory of
            this process, for as long as the object lives; closing a writer or collector
            refreshes it. Default: None.

    Raises:
        RuntimeError: ``store.json`` or a line of an index cannot be read.
        ValueError: the path is a file.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else str(folder_of(path))
        if self.path is not None and os.path.isfile(self.path):
            raise ValueError(f"Invalid path: {self.path} is a file (must be a folder)")
        self.memory: dict[int, MemoryChain] = {}  # the chains of a store in memory
        self.refresh()

    def __repr__(self) -> str:
        return f"SampleStore({self.path!r}): {len(self)} draws of chains {self.chains}"

    def refresh(self) -> SampleStore:
        """Rereads the index, after writes or cuts, and returns itself."""
        chains = [self.memory[chain].files for chain in sorted(self.memory)]
        if self.path is not None and (info := StoreInfo.read(Path(self.path))):
            chains = [read_index(self.path, n, info) for n in chains_in(self.path)]
        files = [file for chain in chains for file in chain]
        rows = [(file, row) for file in files for row in range(file.count)]
        super().__init__(rows, tuple(files[0].info.tensors) if files else ())
        return self


# A file is written at so many bytes or draws, or seconds after its first draw.
_BYTES, _DRAWS, _SECONDS = 4 << 20, 1024, 30.0


class SampleWriter(AbstractContextManager["SampleWriter"]):
    """Appends draws to a chain of a :class:`SampleStore`: one writer for each chain.

    Draws wait in memory until they have 4 MiB, are 1,024 or have waited for 30 seconds:
    the next call then writes them as one file. Several threads can call the methods.

    Args:
        store: a folder, which is made if missing, or a :class:`SampleStore`.
        tensors: a draw, for names, shapes and dtypes; it is not stored.
        chain: >= 0; processes that write at once write different chains. Default: 0.
        dtype: dtype of stored floating-point tensors. Default: each tensor's.
        not_sampled: tensors that are not stored, None for sampled ones. Checksums are
            kept, to detect draws that are put into another model. Default: none.
        likelihood: the predictions' default, one of :mod:`torch_sgmcmc.losses`.

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
        not_sampled: Mapping[str, Tensor | None] | None = None,
        likelihood: Likelihood | None = None,
    ) -> None:
        check_integer("chain", chain)
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise ValueError(f"Invalid dtype: {dtype!r} (must be a floating-point one)")
        if likelihood is not None and not isinstance(likelihood, Likelihood):
            raise wrong_type("likelihood", likelihood, "one of torch_sgmcmc.losses")
        if not tensors:
            raise ValueError("Invalid tensors: there are none to store")
        # Without data, for names, shapes and dtypes.
        self._like = {k: store_files.as_stored(k, t, dtype) for k, t in tensors.items()}
        self._size = sum(t.nbytes for t in self._like.values())
        tensor_info = {k: store_files.described(k, t) for k, t in self._like.items()}
        sums = store_files.checksums(not_sampled or {})
        settings = None if likelihood is None else likelihood.settings()
        info = store_files.StoreInfo(tensor_info, sums, settings)
        self._store = store  # one in memory lives with its writer
        folder = folder_of(store)
        self.files: store_files.MemoryChain | store_files.FolderChain
        if folder is not None:
            self.files = store_files.FolderChain(folder, chain, info)
        elif isinstance(store, SampleStore):  # as without a folder
            self.files = store_files.MemoryChain(store.memory, chain, info)
        # True while draws of an earlier run await a decision of the caller.
        self._is_undecided = len(self) > 0
        self._rows: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
        self._since = 0.0
        self._has_warned = False
        self._lock, self._process = threading.RLock(), os.getpid()

    def __len__(self) -> int:
        """The number of draws that are on the disk."""
        return sum(file.count for file in self.files.files)

    @torch.no_grad()
    def append(
        self,
        draw: Mapping[str, Tensor],
        *,
        step: int,
        lr: float = math.nan,
        temperature: float = 1.0,
        weight: float = 1.0,
        loss: float | Tensor = math.nan,
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
            RuntimeError: earlier draws cannot be written: they wait, without this one.
        """
        self.check_draw(draw)
        given = {"lr": lr, "temperature": temperature, "weight": weight, "loss": loss}
        step = check_integer("step", int(step), low=-(2**63), high=2**63)
        numbers: dict[str, Any] = {
            "step": step,
            **{k: _number(x) for k, x in given.items()},
        }
        numbers["prior_precision"] = tuple(map(_number, prior_precision))
        with self._lock:
            self.check()
            copies = {
                name: torch.empty_like(t, device="cpu").copy_(draw[name])
                for name, t in self._like.items()
            }
            self._warn_of_overflow(draw, copies)
            if not self._rows:
                self._since = time.monotonic()
            self._rows.append((copies, numbers))

    def _warn_of_overflow(
        self, draw: Mapping[str, Tensor], copies: Mapping[str, Tensor]
    ) -> None:
        if self._has_warned:
            return
        for name, copy in copies.items():
            own = draw[name]
            if not copy.is_floating_point() or copy.dtype is own.dtype:
                continue
            if bool((copy.isinf() & own.cpu().isfinite()).any()):
                self._has_warned = True
                warn(
                    f"{name!r} has numbers above {torch.finfo(copy.dtype).max:g}, the "
                    f"largest of {copy.dtype}: they are stored as infinite (take "
                    "another dtype: bfloat16 has the range of float32)"
                )
                return

    def check_draw(self, draw: Mapping[str, Tensor]) -> None:
        """Raises a ValueError if a tensor is missing or of another shape."""
        for name, like in self._like.items():
            tensor = draw.get(name)
            if tensor is None or tensor.shape != like.shape:
                found = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
                raise ValueError(
                    f"Invalid draw: {found} for {name!r} (must have the shape "
                    f"{list(like.shape)})"
                )

    def check(self) -> None:
        """Writes draws that have waited, and raises if the next could not be stored."""
        self._check_open()
        if self._is_undecided:
            raise ValueError(
                f"Invalid store: {self.files.place} has {len(self)} draws of an "
                "earlier run (load the state dict of its checkpoint, or restart())"
            )
        with self._lock:
            count = len(self._rows)
            is_old = count > 0 and time.monotonic() - self._since >= _SECONDS
            if count >= _DRAWS or count * self._size >= _BYTES or is_old:
                self.flush()

    def _check_open(self) -> None:
        if not self.is_open:
            reason = "the writer is closed"
            if self._process != os.getpid():
                reason = f"process {self._process} has opened it, and this is a fork "
                reason += "of it (give each process its own chain)"
            raise RuntimeError(f"Cannot write to {self.files.place}: {reason}")

    def flush(self) -> None:
        """Writes the draws that wait in memory; a RuntimeError leaves them there."""
        with self._lock:
            rows = self._rows
            if not rows:
                return
            self._check_open()
            tensors = {
                name: torch.stack([draw[name] for draw, _ in rows])
                if len(rows) > 1
                else rows[0][0][name][None]  # a large draw is not copied
                for name in self._like
            }
            columns = {k: [numbers[k] for _, numbers in rows] for k in rows[0][1]}
            try:
                self.files.add(tensors, columns)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error}. {self.files.place} has {len(self)} draws; {len(rows)} "
                    "more wait in memory, and the next step or close() tries again"
                ) from error
            self._rows = []  # an interrupt follows a call: it cannot come before this

    def checkpoint(self) -> dict[str, int]:
        """Writes waiting draws; returns the chain's position for :meth:`cut_back`."""
        with self._lock:
            self.flush()
            size, checksum = store_files.end_of(self.files.files)
            # LibTorch reads only pickled ints of 32 bits, with a sign.
            return {"size": size, "crc32": checksum - (checksum >> 31 << 32)}

    def cut_back(self, position: Mapping[str, int]) -> None:
        """Deletes draws after a checkpoint; a ValueError refuses another chain's."""
        end = position["size"], position["crc32"] % 2**32
        with self._lock:
            self._check_open()
            self.flush()
            files = self.files.files
            ends = [store_files.end_of([]), *(file.end for file in files)]
            if end not in ends:
                raise ValueError(f"Invalid checkpoint: it is not of {self.files.place}")
            self.files.keep(files[: ends.index(end)])
            self._is_undecided = False

    def restart(self) -> None:
        """Deletes all draws of the chain, for a run that starts again."""
        with self._lock:
            self._check_open()
            self._rows = []
            self.files.keep([])
            self._is_undecided = False

    @property
    def is_open(self) -> bool:
        """False once the writer is closed, and in a forked process."""
        return self.files.is_open and self._process == os.getpid()

    def close(self) -> None:
        """Writes waiting draws, and releases the chain.

        Raises:
            RuntimeError: draws cannot be written. They wait, and the writer is open.
        """
        with self._lock:
            if self.is_open:
                self.flush()
                self.release()

    def release(self) -> None:
        """Releases the chain, also if waiting draws cannot be written, which raises."""
        with self._lock:
            if not self.is_open:
                return
            try:
                self.flush()
            finally:
                self.files.close()
                if isinstance(self._store, SampleStore) and self._store.path is None:
                    self._store.refresh()

    def __exit__(self, *error: object) -> None:
        (self.close if error[0] is None else self.release)()


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
