"""Files that survive a kill, a full disk and a power cut, and folders of one run.

A checkpoint is torch's own format. Whatever goes wrong ends the program with what and
which file.
"""

from __future__ import annotations

import fcntl
import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "owned", "save"]


def save(content: Any, path: Path) -> None:
    """Writes what ``torch.save`` can, all of it or nothing.

    The new file is on the disk before it takes the old one's place, and so is its name
    before this returns.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise SystemExit(f"Cannot write {path}: {error.strerror}") from error


def load(path: Path, device: torch.device | str = "cpu") -> Any:
    """Reads what ``torch.save`` has written, if not a bit of it is another.

    ``torch.load`` does not look at the sums that the file has of its parts.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            # torch gives its files no attributes, but leaves out what seems a folder.
            folders = [i.filename for i in archive.infolist() if i.external_attr]
        if damaged or folders:
            raise ValueError(f"{damaged or folders[0]} is damaged")
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # of many types, for files with anything in them
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise SystemExit(
            f"Cannot read {path}: {reason or type(error).__name__}\n"
            "Delete it or choose another --out."
        ) from error


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
