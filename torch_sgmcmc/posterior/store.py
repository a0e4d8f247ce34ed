"""Stored draws of a model's parameters, and records of runs beside them."""

from __future__ import annotations

import math
import os
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from itertools import chain as flattened
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from torch_sgmcmc._impl.hyperparams import wrong_type
from torch_sgmcmc.diagnostics.temperatures import (
    Reading,
    TemperatureIssue,
    TemperatureMonitor,
    Temperatures,
)
from torch_sgmcmc.posterior.store_files import (
    CorruptDrawError,
    DrawFile,
    MemoryChain,
    StoreInfo,
    chains_in,
    read_index,
    read_json,
)
from torch_sgmcmc.samplers.sampler import Sampler

__all__ = ["CorruptDrawError", "Draw", "Draws", "SampleStore"]


def folder_of(store: str | os.PathLike[str] | SampleStore) -> Path | None:
    """Returns a store's folder as an absolute path, None for a store in memory."""
    if isinstance(store, SampleStore):
        return None if store.path is None else Path(store.path)
    if not isinstance(store, str | os.PathLike):
        raise wrong_type("store", store, "a path or a SampleStore")
    return Path(os.path.abspath(os.path.expanduser(store)))


class Draw(Mapping[str, Tensor]):
    """One draw: tensors by name, read on the first access.

    The first access compares the file's checksum. Writes into a tensor stay in this
    object. Draws are equal if they are one draw of one store with the same tensors, and
    can be sent to other processes.

    Attributes:
        chain: number of its chain.
        step: the sampler's step that made it.
        lr: step size of the first param group; NaN if there was none.
        temperature: T of the first param group.
        weight: weight in averages: the sign of a signed :class:`HMCECS`, else the
            collector's ``weight``, by default 1.
        loss: the collector's ``loss``, else NaN.
        prior_precision: λ of each param group; empty if unknown.
        path: the file; None for a store in memory.

    Raises:
        CorruptDrawError: on access: the file is missing, cut off, or altered.
    """

    step: int
    lr: float
    temperature: float
    weight: float
    loss: float

    def __init__(self, file: DrawFile, row: int, names: tuple[str, ...]) -> None:
        self._file, self._row, self._names = file, row, names
        self.chain = file.chain
        for name, column in file.columns.items():
            setattr(self, name, column[row])
        self.prior_precision = tuple(file.prior_precision[row])
        self._tensors: dict[str, Tensor] | None = None

    def __repr__(self) -> str:
        return f"Draw(chain={self.chain}, step={self.step}, {len(self)} tensors)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Draw) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def path(self) -> Path | None:
        """The file in the format of safetensors; None for a store in memory."""
        return Path(self._file.path) if self._file.path else None

    @property
    def _identity(self) -> tuple[Any, ...]:
        file = self._file
        return file.path or id(file), file.crc32, self._row, self._names

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tensors": None}

    def read_run(self) -> dict[str, Any] | None:
        """Returns the record kept beside the chain's draws, or None."""
        if self.path is not None:
            return read_json(self.path.with_name("run.json"))
        return self._file.memory and self._file.memory.run

    @property
    def not_sampled(self) -> dict[str, int]:
        """Checksums of the model's tensors that are neither sampled nor stored."""
        return self._file.info.not_sampled

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        if self._tensors is None:
            found, row = self._file.read(), self._row
            # Rows of shared files and of memory are copied.
            alone = self._file.count == 1 and self.path is not None
            self._tensors = {
                key: found[key][row] if alone else found[key][row].clone()
                for key in self._names
            }
        return self._tensors[name]


class Draws(Sequence[Draw]):
    """Draws of one or several chains, in the order of chains and steps.

    ``draws[i]`` is a :class:`Draw`, ``draws[i:j]`` are some of them, ``draws[name]``
    and ``draws[names]`` all of them with these tensors alone. None of these reads a
    tensor.
    """

    def __init__(
        self, files: Sequence[DrawFile], rows: Sequence[int], names: tuple[str, ...]
    ) -> None:
        self._files, self._rows, self._names = files, rows, names
        self._ends = list(accumulate(file.count for file in files))

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        names = self.names
        some = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        return f"{len(self)} draws of chains {self.chains}: {some or 'no tensor'}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Returns the one tensor of ``draws[name]`` for all draws, [draws, ...]."""
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
            return Draws(self._files, self._rows[index], self._names)
        if hasattr(index, "__index__"):
            row = self._rows[index]
            place = bisect_right(self._ends, row)
            file = self._files[place]
            row -= self._ends[place] - file.count
            return Draw(file, row, self._names)
        names = [index] if isinstance(index, str) else list(index)
        for name in names:
            if name not in self._names:
                raise KeyError(f"no draw has {name!r} (they have {self.names})")
        return Draws(self._files, self._rows, tuple(names))

    @property
    def likelihood(self) -> dict[str, Any] | None:
        """Settings of the chains' likelihood, None if unknown."""
        return self._files[0].info.likelihood if self._files else None

    @property
    def names(self) -> list[str]:
        """Names of the tensors; empty without draws."""
        return list(self._names) if len(self) else []

    @property
    def chains(self) -> list[int]:
        """Numbers of the chains that have draws."""
        return sorted({file.chain for file in self._by_file()})

    def chain(self, chain: int) -> Draws:
        """Returns the draws of one chain.

        Raises:
            ValueError: the chain has no draws.
        """
        found = [rows for file, rows in self._by_file().items() if file.chain == chain]
        if not found:
            raise ValueError(
                f"Invalid chain: {chain!r} (there are draws of {self.chains})"
            )
        return Draws(self._files, [*flattened(*found)], self._names)

    def intact(self) -> Draws:
        """Returns the draws whose files are intact; reads all files.

        A UserWarning names each damaged file and its damage.
        """
        rows: list[int] = []
        for file, of_file in self._by_file().items():
            try:
                file.read()
            except CorruptDrawError as error:
                warnings.warn(str(error), stacklevel=2)
            else:
                rows += of_file
        return Draws(self._files, rows, self._names)

    def _by_file(self) -> dict[DrawFile, list[int]]:
        found: dict[DrawFile, list[int]] = {}
        for row in self._rows:
            file = self._files[bisect_right(self._ends, row)]
            found.setdefault(file, []).append(row)
        return found


class SampleStore(Draws):
    """Draws of a model's parameters, of one or several chains, on disk or in memory.

    A folder of safetensors files, with an index of JSON lines for each chain that
    describes each draw (docs/store.md). C++ writes and reads the same files. A store
    can be opened while :class:`Collector` or :class:`SampleWriter` write to it, and
    shows the draws of the time when it was opened or last refreshed. Only requested
    tensors are read::

        store = sg.SampleStore("draws")
        len(store), store.chains, store.names
        for draw in store:                      # a Mapping from names to tensors
            draw["fc.weight"], draw.step, draw.weight
        store.chain(1)[-10:]["fc.weight"]       # the last ten of chain 1, one tensor

    Args:
        path: the folder; a missing one has no draws. None keeps draws in the memory of
            this process, for as long as the object lives. Default: None.

    Raises:
        RuntimeError: ``store.json`` or an index cannot be read; the message names the
            line.
        ValueError: the path is a file.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else str(folder_of(path))
        if self.path is not None and os.path.isfile(self.path):
            raise ValueError(f"Invalid path: {self.path} is a file (must be a folder)")
        #: Chains of a store in memory.
        self.memory: dict[int, MemoryChain] = {}
        self.info: StoreInfo | None = None
        self.refresh()

    def __repr__(self) -> str:
        place = "in memory" if self.path is None else repr(self.path)
        return f"SampleStore({place}): {len(self)} draws of chains {self.chains}"

    def open_in_memory(self, chain: int, info: StoreInfo) -> MemoryChain:
        """Returns a chain in memory for its one writer."""
        difference = self.info and self.info.difference(info)
        if difference:
            raise ValueError(
                f"Invalid store: its draws are of another model: {difference}"
            )
        self.info = self.info or info
        found = self.memory.setdefault(chain, MemoryChain(chain, self.info))
        if found.is_open:
            raise RuntimeError(
                f"Cannot write to {found.place}: this process writes to it already"
            )
        found.is_open = True
        return found

    def refresh(self) -> SampleStore:
        """Rereads the index, after writes or cuts, and returns itself."""
        files: list[DrawFile] = []
        if self.path is None:
            for chain in sorted(self.memory):
                files += self.memory[chain].files
        else:
            folder = Path(self.path)
            self.info = StoreInfo.read(folder)
            for chain in chains_in(folder) if self.info is not None else ():
                files += read_index(folder, chain, self.info)
        names = () if self.info is None else tuple(self.info.tensors)
        rows = range(sum(file.count for file in files))
        super().__init__(files, rows, names)
        return self


# Most points of a trace, and steps of a point at first.
_POINTS, _WIDTH = 400, 10
# False alarm rate of a chain: 1 % for ten chains together.
_RATE = 0.001
# Settings of param groups that determine the sampled posterior and its error.
_SETTINGS = ("num_data", "prior_precision", "temperature", "lr", "step_size")
_NUMBERS = (int, float, Tensor)


class Trace:
    """Means of a number over blocks of steps, in constant memory."""

    def __init__(self) -> None:
        self.width = _WIDTH
        self.means: list[float] = []
        self._sum: Tensor | float | None = None
        self._count = 0

    def add(self, value: Tensor | float) -> None:
        """Adds a step's value; waits for a device once a point."""
        now = value.detach().double() if isinstance(value, Tensor) else float(value)
        self._sum = now if self._sum is None else self._sum + now
        self._count += 1
        if self._count < self.width:
            return
        self.means.append(float(self._sum) / self.width)
        self._sum, self._count = None, 0
        if len(self.means) == _POINTS:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [(a + b) / 2 for a, b in pairs]
            self.width *= 2

    def state_dict(self) -> dict[str, Any]:
        """Returns the complete state."""
        rest = None if self._sum is None else float(self._sum)
        kept = {"width": self.width, "means": list(self.means)}
        return {**kept, "sum": rest, "count": self._count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state dict."""
        self.width, self.means = state_dict["width"], list(state_dict["means"])
        self._sum, self._count = state_dict["sum"], state_dict["count"]


@dataclass(frozen=True)
class RunRecord:
    """The record of a chain's run beside its draws."""

    sampler: str
    temperature: float
    steps: int
    num_skipped: int
    #: Of HMC; None for other samplers.
    acceptance: float | None = None
    num_divergences: int | None = None
    #: Number of observations, and the temperatures by tensor.
    num_observed: int = 0
    tensors: Mapping[str, Temperatures] = field(default_factory=dict)
    all: Temperatures | None = None
    issues: tuple[TemperatureIssue, ...] = ()
    #: T_kin of all parameters over time, by batches of observations.
    kinetic: tuple[float, ...] = ()
    configurational: tuple[float, ...] = ()
    #: The mean loss of so many steps each.
    loss_width: int = 0
    losses: tuple[float, ...] = ()
    #: Steps from one observation to the next.
    interval: int = 1
    #: The sampler's seed, the key of its noise.
    seed: int | None = None
    #: num_data, prior_precision, temperature and lr of each param group.
    settings: tuple[Mapping[str, float], ...] = ()


def record_run(
    sampler: Sampler,
    monitor: TemperatureMonitor | None = None,
    losses: Trace | None = None,
    *,
    temperature: float | None = None,
) -> RunRecord:
    """Returns the record of a chain's run.

    ``temperature`` is the intended one; None takes the sampler's present one.
    """
    of_all: dict[str, Any] = {}
    if monitor is not None and monitor.num_observed:
        over_time = zip(
            ("kinetic", "configurational"), monitor.over_time(), strict=True
        )
        of_all = {
            **{"num_observed": monitor.num_observed, "interval": monitor.interval},
            "tensors": {name: monitor.tensor(name) for name in monitor.names},
            **{"all": monitor.all(), "issues": tuple(monitor.issues(rate=_RATE))},
            **{name: tuple(series) for name, series in over_time},
        }
    group = sampler.param_groups[0]
    return RunRecord(
        sampler=type(sampler).__name__,
        temperature=float(group["temperature"]) if temperature is None else temperature,
        steps=int(group["step"]),
        num_skipped=sampler.num_skipped,
        acceptance=_known(sampler, "acceptance_rate"),
        num_divergences=_known(sampler, "num_divergences"),
        loss_width=0 if losses is None else losses.width,
        losses=() if losses is None else tuple(losses.means),
        seed=int(sampler.seed),
        settings=tuple(map(_settings, sampler.param_groups)),
        **of_all,
    )


def _settings(group: Mapping[str, Any]) -> dict[str, float]:
    values = {k: group[k] for k in _SETTINGS if isinstance(group.get(k), _NUMBERS)}
    is_one = {k: not isinstance(v, Tensor) or v.numel() == 1 for k, v in values.items()}
    return {k: float(v) for k, v in values.items() if is_one[k]}


def _known(sampler: Sampler, name: str) -> Any:
    value = getattr(sampler, name, None)
    return None if isinstance(value, float) and math.isnan(value) else value


def read_run_record(draw: Draw) -> RunRecord | None:
    """Returns the record that a collector wrote beside a chain's draws, or None."""
    content = draw.read_run()
    if content is None:
        return None
    try:
        return _parsed(dict(content))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        assert draw.path is not None
        raise RuntimeError(
            f"Cannot read {draw.path.with_name('run.json')}: it is damaged ({error!r})"
        ) from error


def _parsed(content: dict[str, Any]) -> RunRecord:
    content["tensors"] = {k: _temperatures(v) for k, v in content["tensors"].items()}
    if content["all"] is not None:
        content["all"] = _temperatures(content["all"])
    content["issues"] = tuple(TemperatureIssue(**f) for f in content["issues"])
    for name in ("kinetic", "configurational", "losses", "settings"):
        content[name] = tuple(content.get(name, ()))
    return RunRecord(**content)


def plain(ran: RunRecord) -> dict[str, Any]:
    """Returns a form for JSON: fields by name, null for non-finite numbers."""
    content = asdict(ran)
    content["tensors"] = {name: _named(read) for name, read in ran.tensors.items()}
    content["all"] = None if ran.all is None else _named(ran.all)
    content["issues"] = [finding._asdict() for finding in ran.issues]
    return finite(content)


def _named(read: Temperatures) -> dict[str, list[float]]:
    return {name: [*pair] for name, pair in read._asdict().items()}


def finite(value: Any) -> Any:
    """Replaces numbers that are not finite by None."""
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _temperatures(content: Mapping[str, list[float | None]]) -> Temperatures:
    pairs = {k: [math.nan if x is None else x for x in v] for k, v in content.items()}
    return Temperatures(**{name: Reading(*pair) for name, pair in pairs.items()})
