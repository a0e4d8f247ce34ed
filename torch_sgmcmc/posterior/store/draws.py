"""Draws as they are read: mapped into memory, and only what is asked for."""

from __future__ import annotations

import math
import os
import shutil
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.posterior.store.dtypes import DTYPES

__all__ = ["DamagedDraw", "Draw", "Draws", "Layout"]


class Owner:
    """Of a store in memory, whose folder is deleted with the last that knows it."""

    def __init__(self, path: str) -> None:
        weakref.finalize(self, _forget, path, os.getpid())


def _forget(path: str, process: int) -> None:
    if os.getpid() == process:  # not a child that was forked
        shutil.rmtree(path, ignore_errors=True)


class Folder(str):
    """A chain's, and who has it; other processes are sent its name."""

    owner: Owner | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


class StoredTensor(NamedTuple):
    """A tensor in a draw: the how manieth it is, and where."""

    place: int
    begin: int
    end: int
    dtype: torch.dtype
    shape: list[int]


class Record(NamedTuple):
    """What an index says of a draw."""

    number: int
    step: int
    lr: float
    temperature: float
    weight: float
    loss: float
    prior_precision: tuple[float, ...]
    file: str
    slot: int | None
    crc32: int

    @classmethod
    def of(cls, record: _C.DrawRecord) -> Record:
        """The same, as it can be sent to another process."""
        return cls(*(getattr(record, name) for name in cls._fields))


class Layout:
    """A draw's bytes, of which all draws of a model have the same."""

    def __init__(self, host: _C.DrawLayout) -> None:
        self.host = host
        self.size = host.size
        self.header_size = host.header_size
        begins = host.begins
        self.names = {
            name: StoredTensor(i, begins[i], begins[i + 1], DTYPES[dtype], shape)
            for i, (name, dtype, shape) in enumerate(host.tensors)
        }
        # Tensors of a dtype lie one behind the other.
        self._runs: list[tuple[torch.dtype, int, int, list[Any]]] = []
        for dtype, group in groupby(self.names.values(), lambda t: t.dtype):
            run = list(group)
            views = [
                (t.shape, _strides(t.shape), t.begin // dtype.itemsize) for t in run
            ]
            self._runs.append((dtype, run[0].begin, run[-1].end, views))

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """All tensors of a draw, in its memory."""
        found: list[Tensor] = []
        for dtype, begin, end, views in self._runs:
            run = memory[begin:end].view(dtype)
            found += [run.as_strided(*view) for view in views]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _layout_of, (self.host.tensors,)


def _strides(shape: list[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _layout_of(tensors: list[tuple[str, str, list[int]]]) -> Layout:
    return Layout(_C.DrawLayout(tensors))


class DamagedDraw(RuntimeError):
    """A draw's file is not as it was written; the message names it."""


class Draw(Mapping[str, Tensor]):
    """One draw: tensors by name, each read when it is asked for.

    A tensor is mapped into memory, or read where draws are small and share a file, in
    the dtype that it was stored in. What is written into it stays in this process. That
    its bytes are those that were stored is checked when it is first asked for. Draws
    are equal if they are one draw of one store, with the same tensors, and can be sent
    to other processes.

    Args:
        chain: its chain.
        number: its place among the candidates of its chain, from 1 on.
        step: the sampler's step that made it.
        lr: step size of the first param group; NaN if there was none.
        temperature: T of the first param group.
        weight: of the draw in averages: the sign of a signed :class:`HMCECS`, else 1
            unless the collector was told another.
        loss: what the collector was told, else NaN.
        prior_precision: λ of each param group, as a :class:`GammaPrecision` has last
            drawn it; empty if the writer was not told.
        folder: that of its chain.

    Raises:
        DamagedDraw: on access: the file is missing, cut off, or altered.
    """

    def __init__(
        self,
        folder: str,
        chain: int,
        record: Record,
        layout: Layout,
        names: Mapping[str, StoredTensor],
    ) -> None:
        self.chain = chain
        self.number = record.number
        self.step = record.step
        self.lr = record.lr
        self.temperature = record.temperature
        self.weight = record.weight
        self.loss = record.loss
        self.prior_precision = record.prior_precision
        self.folder = folder
        self._record = record
        self._layout = layout
        self._names = names
        self._checked: set[str] = set()

    def __repr__(self) -> str:
        return f"Draw(chain={self.chain}, step={self.step}, {len(self)} tensors)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Draw):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def path(self) -> Path:
        """Its file, in the format of safetensors, or that of many small draws."""
        return Path(self.folder) / self._record.file

    @property
    def _identity(self) -> tuple[Any, ...]:
        names = tuple(sorted(self._names))
        return self.path, self.number, self._record.crc32, names

    def __getstate__(self) -> dict[str, Any]:
        read = ("_mapped", "_read")
        kept = {key: v for key, v in self.__dict__.items() if key not in read}
        return {**kept, "_checked": set()}

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        place, begin, end, dtype, shape = self._names[name]
        if self._record.slot is not None:
            tensors, altered = self._read
            if place in altered:
                raise self._damaged(f"the numbers of {name!r} are altered")
            return tensors[place]
        memory, sums = self._mapped
        if name not in self._checked:
            found = _C.crc32(memory.data_ptr() + begin, end - begin)
            if found != sums[place]:
                raise self._damaged(f"the numbers of {name!r} are altered")
            self._checked.add(name)
        return memory[begin:end].view(dtype).view(shape)

    @cached_property
    def _mapped(self) -> tuple[Tensor, list[int]]:
        """A file's bytes, and the sums of the tensors."""
        memory = self._memory()
        return memory, self._layout.host.sums(memory.data_ptr())

    @cached_property
    def _read(self) -> tuple[list[Tensor], list[int]]:
        """A small draw's tensors, and which of them are altered."""
        memory = self._memory()
        altered = self._layout.host.altered(memory.data_ptr())
        return self._layout.tensors(memory), altered

    def _memory(self) -> Tensor:
        layout = self._layout
        try:
            memory = self._bytes(layout.size)
        except OSError as error:
            raise self._damaged(
                f"{error.strerror} (a writer deletes draws when its thinning doubles: "
                "then refresh() the store)"
            ) from error
        sum_of_header = _C.crc32(memory.data_ptr(), layout.header_size)
        if sum_of_header != self._record.crc32:
            raise self._damaged("its header is altered")
        return memory

    def _bytes(self, size: int) -> Tensor:
        path = f"{self.folder}/{self._record.file}"
        slot = self._record.slot
        if slot is None:
            found = os.stat(path).st_size
            if found == size:
                return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
        else:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                read = bytearray(os.pread(file, size, slot * size))
            finally:
                os.close(file)
            found = len(read)
            if found == size:
                return torch.frombuffer(read, dtype=torch.uint8)
        raise self._damaged(f"it has {found} bytes of the {size} that were written")

    def _damaged(self, reason: str) -> DamagedDraw:
        return DamagedDraw(
            f"Cannot read draw {self.number} of chain {self.chain}, {self.path}: "
            f"{reason}"
        )

    def damage(self) -> str | None:
        """What is wrong with its file, all of which is read; None if nothing is."""
        try:
            for name in self:
                self[name]
        except DamagedDraw as error:
            return str(error)
        return None


class Draws(Sequence[Draw]):
    """Draws of one or several chains, in the order of chains and steps.

    ``draws[i]`` is a :class:`Draw`, ``draws[i:j]`` are some of them, ``draws[name]``
    and ``draws[names]`` all of them with these tensors alone. None of these reads a
    tensor.
    """

    def __init__(self, draws: Iterable[tuple[Any, ...]], names: Any = None) -> None:
        # (folder, chain, record, layout) of each.
        self._draws = tuple(draws)
        self._names: Mapping[str, StoredTensor] | None = names

    def __len__(self) -> int:
        return len(self._draws)

    def __repr__(self) -> str:
        names = self.names
        some = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        return f"{len(self)} draws of chains {self.chains}: {some or 'no tensor'}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """One tensor of all draws, [draws, ...], for NumPy: of ``draws[name]``."""
        if len(self.names) != 1:
            raise TypeError(
                f"Invalid draws: an array is of one tensor, and they have "
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
            return Draws(self._draws[index], self._names)
        if hasattr(index, "__index__"):
            folder, chain, record, layout = self._draws[index]
            names = layout.names if self._names is None else self._names
            return Draw(folder, chain, record, layout, names)
        return self._named([index] if isinstance(index, str) else list(index))

    def _named(self, names: list[str]) -> Draws:
        known = self._names
        if known is None:
            known = self._draws[0][3].names if self._draws else {}
        for name in names:
            if name not in known:
                raise KeyError(f"no draw has {name!r} (they have {list(known)})")
        return Draws(self._draws, {name: known[name] for name in names})

    @property
    def names(self) -> list[str]:
        """The tensors' names, in no particular order; empty without draws."""
        if self._names is not None:
            return list(self._names)
        return list(self._draws[0][3].names) if self._draws else []

    @property
    def chains(self) -> list[int]:
        """The chains that have draws."""
        return sorted({chain for _, chain, _, _ in self._draws})

    def chain(self, chain: int) -> Draws:
        """The draws of one chain.

        Raises:
            ValueError: there is none.
        """
        if chain not in self.chains:
            raise ValueError(
                f"Invalid chain: {chain!r} (there are draws of {self.chains})"
            )
        return Draws((d for d in self._draws if d[1] == chain), self._names)

    def intact(self) -> Draws:
        """The draws whose files are as they were written; all of them are read.

        A UserWarning names each of the others, and what is wrong.
        """
        found = [(draw, self[i].damage()) for i, draw in enumerate(self._draws)]
        for _, damage in found:
            if damage is not None:
                warnings.warn(damage, stacklevel=2)
        return Draws((draw for draw, damage in found if damage is None), self._names)
