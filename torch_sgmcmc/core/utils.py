"""Small stateless helpers."""

from __future__ import annotations

import copy
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
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
