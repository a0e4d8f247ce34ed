"""Bytes of a store, to compare with another's; what a file gives back of a value."""

import io
from pathlib import Path
from typing import Any

import torch

__all__ = ["files", "through_file"]


def through_file(value: Any, *, weights_only: bool = True) -> Any:
    """What torch.load reads of what torch.save has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def files(folder: Path) -> dict[str, bytes]:
    """All files of a store, but for locks and checkpoints, by their path in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".pt" and "lock" not in path.name
    }
