"""Modules around others: of torch.compile, DistributedDataParallel, AveragedModel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

__all__ = ["plain_name", "plain_names", "resolved", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that is inside of a wrapper, or of several."""
    while (inside := _inside(model)) is not None:
        model = model.get_submodule(inside)
    return model


def plain_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """From tensors' names in a module to those that they have without wrappers."""
    wrappers = {
        path: inside
        for path, module in model.named_modules(remove_duplicate=False)
        if (inside := _inside(module)) is not None
    }
    return {name: _plain(name, wrappers) for name in names}


def resolved(name: str, known: Mapping[str, Any]) -> str:
    """A plain name that is known, for one of a model that was wrapped otherwise."""
    plain = name.replace("_orig_mod.", "")
    while plain not in known and plain.startswith("module."):
        plain = plain.removeprefix("module.")
    return plain


def plain_name(name: str) -> str:
    """A name without all that may be a wrapper's, to be compared with others."""
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_orig_mod", "module"))


def _inside(module: nn.Module) -> str | None:
    if "_orig_mod" in module._modules:  # torch.compile's, whose import takes its time
        return "_orig_mod"
    wrappers = (DataParallel, DistributedDataParallel, AveragedModel)
    return "module" if isinstance(module, wrappers) else None


def _plain(name: str, wrappers: Mapping[str, str]) -> str:
    path, kept = "", []
    for part in name.split("."):
        if wrappers.get(path) != part:
            kept.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(kept)
