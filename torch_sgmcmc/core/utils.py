"""Small helpers."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import copy
import importlib
import math
import signal
import sys
import threading
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from itertools import chain
from multiprocessing import parent_process
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

#: Dtypes of parameters.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


T = TypeVar("T")


def progress_bar(
    items: Iterable[T], name: str, shown: bool, *, unit_scale: int = 1
) -> Iterable[T]:
    """Returns the items, with a progress bar if wanted and available."""
    if not shown:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=name, unit_scale=unit_scale if unit_scale > 1 else False)


def length_of(loader: Any) -> int | None:
    """Returns the length, None if unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # torch's loader of an IterableDataset
        return None


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yields all tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    if isinstance(batch, list | tuple):
        for part in batch:
            yield from tensors_in(part)


def mapped(function: Callable[[Any], Any], batch: Any, method: str = "") -> Any:
    """Applies a function to all tensors of a nest; keeps the types.

    Also to objects with this method, such as batches of graphs.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        values = {key: mapped(function, v, method) for key, v in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return values
        kind: Any = type(batch)
        if hasattr(kind, "auto_batch_size_"):  # a TensorDict checks lengths
            return kind(values).auto_batch_size_(1)
        same = copy.copy(batch)  # for example a BatchEncoding
        for key, value in values.items():
            same[key] = value
        return same
    if isinstance(batch, list | tuple):
        parts = [mapped(function, value, method) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)
    return function(batch) if method and hasattr(batch, method) else batch


def rows_of(batch: Any) -> int | None:
    """Returns the number of rows of a minibatch: the length that its tensors share.

    None without tensors, or if no two lengths agree.
    """
    tensors = (t for t in tensors_in(batch) if t.dim())
    lengths = Counter(map(len, tensors)).most_common()
    if not lengths or (len(lengths) > 1 and lengths[0][1] == 1):
        return None
    return lengths[0][0]


def first_rows(batch: Any, count: int) -> Any:
    """Returns at most ``count`` rows of a batch."""
    rows = rows_of(batch)
    return batch if rows is None else _cut(batch, rows, slice(count))


def halves(batch: Any) -> tuple[Any, Any, Any] | None:
    """Returns a batch's two halves and both together; None if it has no rows."""
    rows = rows_of(batch)
    if rows is None or rows < 2:
        return None
    half = rows // 2
    parts = (slice(half), slice(half, 2 * half), slice(2 * half))
    first, second, both = (_cut(batch, rows, part) for part in parts)
    return first, second, both


def _cut(batch: Any, rows: int, part: slice) -> Any:
    return mapped(lambda t: t[part] if t.dim() and len(t) == rows else t, batch)


def optional(module: str, package: str, user: str, extra: str = "diagnostics") -> Any:
    """Imports a module; the error names its user and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{user} needs {package}, which is not installed: pip install "
            f"'torch_sgmcmc[{extra}]'"
        ) from error


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside of all wrappers."""
    while (inside := _inside(model)) is not None:
        model = model.get_submodule(inside)
    return model


def plain_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Maps tensors' names in a module to their names without wrappers."""
    wrappers = {
        path: inside
        for path, module in model.named_modules(remove_duplicate=False)
        if (inside := _inside(module)) is not None
    }
    return {name: _plain(name, wrappers) for name in names}


def resolved(name: str, known: Mapping[str, Any]) -> str:
    """Returns a known plain name for a name from a differently wrapped model."""
    plain = name.replace("_orig_mod.", "")
    while plain not in known and plain.startswith("module."):
        plain = plain.removeprefix("module.")
    return plain


def plain_name(name: str) -> str:
    """Returns a name without parts that may belong to wrappers."""
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_orig_mod", "module"))


def _inside(module: nn.Module) -> str | None:
    if "_orig_mod" in module._modules:  # torch.compile's; its import is slow
        return "_orig_mod"
    if "_original_module" in module._modules:  # Lightning Fabric's
        return "_forward_module"
    wrappers = (DataParallel, DistributedDataParallel, AveragedModel)
    return "module" if isinstance(module, wrappers) else None


def _plain(name: str, wrappers: Mapping[str, str]) -> str:
    path, kept = "", []
    for part in name.split("."):
        if wrappers.get(path) != part:
            kept.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(kept)


class Snapshot:
    """Values of tensors, and a model's buffers."""

    def __init__(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        held = [*params, *(b for _, _, b in self._buffers if b is not None)]
        self._values = [
            (t, _distinct(t).clone())
            for t in {id(t): t for t in held}.values()
            if not (t.is_meta or is_lazy(t))
        ]

    def changed(self) -> list[Tensor]:
        """Returns the tensors that have other values now."""
        return [t for t, v in self._values if not torch.equal(_distinct(t), v)]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts buffers and values back."""
        for module, name, buffer in self._buffers:
            if module._buffers[name] is not buffer:  # or a ScriptModule's handle
                setattr(module, name, buffer)
        for tensor, value in self._values:
            if not torch.equal(_distinct(tensor), value):
                _distinct(tensor).copy_(value)


def _distinct(tensor: Tensor) -> Tensor:
    """Returns a view without the elements that an expanded tensor repeats."""
    tensor = tensor.detach()
    part = getattr(tensor, "_local_tensor", tensor)
    if part.layout is torch.strided:
        for dim, stride in enumerate(part.stride()):
            if stride == 0 and part.shape[dim]:
                part = part.narrow(dim, 0, 1)
    return part


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Delays SIGINT (Ctrl-C) and SIGTERM to the end of the outermost context.

    A second SIGINT takes effect at once, except in a child process: its parent may send
    several. Nothing is delayed outside of the main thread, where Python calls no
    handlers. Ignored signals and handlers that are not Python's stay as they are.
    """

    def __init__(self) -> None:
        self.pending: int | None = None
        self._former: dict[int, Any] = {}
        self._frame: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # Those of the module signal take ten times as long, for enums.
                former = _signal.getsignal(number)
                if former not in (_signal.SIG_IGN, None):
                    self._former[number] = former
                    _signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        former = self._restore()
        if self.pending is not None:
            self._deliver(self.pending, former)

    def _note(self, number: int, frame: Any) -> None:
        if self.pending == number == _signal.SIGINT and parent_process() is None:
            self.pending = None
            self._deliver(number, self._restore())
        elif self.pending is None:
            self.pending, self._frame = number, frame

    def _deliver(self, number: int, former: Mapping[int, Any]) -> None:
        if callable(former[number]):  # another signal would wake event loops twice
            former[number](number, self._frame)
        else:
            signal.raise_signal(number)

    def _restore(self) -> dict[int, Any]:
        former, self._former = self._former, {}
        for number, handler in reversed(former.items()):  # SIGINT last: it may raise
            _signal.signal(number, handler)
        return former


def panels(user: str, count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Returns a figure and its axes, at most three in a row, with sizes in inches."""
    pyplot = optional("matplotlib.pyplot", "matplotlib", user)
    columns = min(3, max(1, count))
    rows = max(1, -(-count // columns))
    options = {"figsize": (width * columns, height * rows), "layout": "constrained"}
    figure, axes = pyplot.subplots(rows, columns, squeeze=False, **options)
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return figure, [*axes.flat[:count]]


class BatchMeans:
    """The mean of a correlated series and its error, in constant memory.

    The series is cut into batches of equal length, whose means are nearly independent
    once batches are longer than the autocorrelation time. At 32 batches, neighbours are
    merged. With b whole batches the standard error is sd(batch means) / √b, with b - 1
    degrees of freedom. (Flegal and Jones 2010; here batches grow with the series.)
    """

    MOST, FEWEST = 32, 8  # most batches, and fewest with an error

    def __init__(self, state: Sequence[float] = (0, 1, 0, 0.0)) -> None:
        count, length, rest, *total = state[:4] if len(state) > 3 else (-1, 1, 0, 0)
        self.means = list(state[4:])
        counts = (count, length, rest)
        is_whole = all(x >= 0 and float(x).is_integer() for x in counts)
        is_right = is_whole and rest < length and len(self.means) < self.MOST
        if not is_right or count != len(self.means) * length + rest:
            raise ValueError("Invalid state of batch means")
        self.count, self._length, self._rest = int(count), int(length), int(rest)
        self._total: Any = total[0]  # a number, or a tensor of one

    @property
    def state(self) -> list[float]:
        """The numbers from which the constructor makes a copy."""
        counts = map(float, (self.count, self._length, self._rest))
        return [*counts, float(self._total), *self.means]

    def add(self, value: Any) -> None:
        """Adds the next number, or a tensor of one."""
        self.count += 1
        self._rest += 1
        self._total = self._total + value
        if self._rest == self._length:
            self.means.append(float(self._total) / self._length)
            self._rest, self._total = 0, 0.0
            if len(self.means) == self.MOST:
                self.means, self._length = _merged(self.means), 2 * self._length

    @property
    def mean(self) -> float:
        """The mean of all numbers; NaN before any."""
        total = sum(self.means) * self._length + self._total
        return total / self.count if self.count else math.nan

    @property
    def error(self) -> float:
        """The mean's standard error; NaN with few batches."""
        return _error(self.means)

    def half_width(self, probability: float, *, widest: bool = False) -> float:
        """Returns half the width of Student's interval for the series' expectation.

        Args:
            probability: the probability that the interval contains the expectation.
            widest: take the largest width for these batches and for merged neighbours,
                while 8 remain: batches of a slow series still depend on each other.
        """
        from scipy.special import stdtrit

        means, widths = self.means, list[float]()
        while not widths or (widest and len(means) >= self.FEWEST):
            quantile = stdtrit(max(len(means) - 1, 1), 0.5 + probability / 2)
            widths.append(_error(means) * float(quantile))
            means = _merged(means)
        return max(widths)


def _merged(means: Sequence[float]) -> list[float]:
    return [0.5 * (a + b) for a, b in zip(means[::2], means[1::2], strict=False)]


def _error(means: Sequence[float]) -> float:
    count = len(means)
    if count < BatchMeans.FEWEST:
        return math.nan
    mean = sum(means) / count
    return math.sqrt(sum((x - mean) ** 2 for x in means) / (count - 1) / count)


# A module's dict of parameters, the key in it, and the parameter.
Slot = tuple[dict[str, Any], str, Tensor]


class Slots:
    """The places of a module's parameters.

    The module is searched once. Later calls only check that it still holds the same
    parameters and modules under the same names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._views: list[Collection[object]] = []
        self._known: list[object] = []
        self._lengths: list[int] = []
        self._slots: list[Slot] = []

    def of(self, ids: Iterable[int]) -> list[Slot]:
        """Returns all places of the parameters with these ids."""
        if not self._are_as_known():
            self._find()
        ids = set(ids)
        return [slot for slot in self._slots if id(slot[2]) in ids]

    def _are_as_known(self) -> bool:
        return (
            bool(self._views)
            and list(map(len, self._views)) == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._known))
        )

    def _find(self) -> None:
        modules = list(self.model.modules())
        dicts = [d for m in modules for d in (m._modules, m._parameters)]
        # Views follow their dicts, so they can be compared again.
        self._views = [view for d in dicts for view in (d.keys(), d.values())]
        self._lengths = list(map(len, self._views))
        self._known = list(chain.from_iterable(self._views))
        held = [(d, *item) for d in dicts[1::2] for item in d.items()]
        self._slots = [slot for slot in held if slot[2] is not None]


def check_docstrings() -> None:
    """Raises under ``python -OO``, where arviz_stats cannot be imported."""
    if sys.flags.optimize > 1:
        raise RuntimeError(
            "Cannot report convergence under python -OO, which removes docstrings that "
            "arviz_stats reads (use python -O, or sample(report=False))"
        )


def arviz(name: str, values: Tensor, **options: Any) -> Tensor:
    """Calls a function of ArviZ, whose import is slow, with [chains, draws, ...]."""
    import numpy as np

    check_docstrings()
    from arviz_stats.base import array_stats

    array = values.double().cpu().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        found = getattr(array_stats, name)(array, chain_axis=0, draw_axis=1, **options)
    return torch.as_tensor(np.asarray(found), dtype=torch.float64, device="cpu")
