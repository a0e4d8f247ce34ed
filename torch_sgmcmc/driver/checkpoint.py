"""A file that is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "save"]


def save(content: Any, path: Path) -> None:
    """What ``torch.save`` can, on the disk when this returns.

    Raises:
        RuntimeError: it cannot be written; the file is as before.
    """
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RuntimeError(f"Cannot write {path}: {error.strerror}") from error


def load(path: Path) -> Any:
    """What :func:`save` wrote, in memory of the CPU.

    Raises:
        RuntimeError: it cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, for files with anything in them
        raise RuntimeError(
            f"Cannot read {path}: {str(error).splitlines()[0]} (restart=True begins "
            "anew)"
        ) from error
