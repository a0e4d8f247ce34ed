"""Stored draws of a model's parameters, and records of runs beside them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from torch_sgmcmc.core.hyperparams import wrong_type
from torch_sgmcmc.draws.store_files import (
    CorruptDrawError,
    DrawFile,
    MemoryChain,
    StoreInfo,
    chains_in,
    read_index,
    read_json,
)


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
        not_sampled: checksums of tensors that are neither sampled nor stored.
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
