"""Checkpoints, and folders of one run, for programs that say what is wrong and end."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import torch_sgmcmc as sg

__all__ = ["load", "owned", "save"]


def save(content: Any, path: Path) -> None:
    """Writes what ``torch.save`` can, all of it or nothing."""
    try:
        sg.save(content, path)
    except RuntimeError as error:
        raise SystemExit(str(error)) from error


def load(path: Path, device: torch.device | str = "cpu") -> Any:
    """Reads what :func:`save` has written, if not a bit of it is another."""
    try:
        return sg.load(path, device)
    except RuntimeError as error:
        raise SystemExit(f"{error}\nDelete it or choose another --out.") from error


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Makes a folder and keeps other processes' runs out of it.

    The lock ends with the process, however that ends; its file stays.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        raise SystemExit(f"Cannot write {path}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SystemExit(
                f"Another run writes to {folder}.\n"
                "Wait until it ends or choose another --out."
            ) from error
        yield
