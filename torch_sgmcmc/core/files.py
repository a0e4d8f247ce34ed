"""Checkpoints that survive a kill, a full disk and a power cut."""

from __future__ import annotations

import io
import os
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "save"]


def save(content: Any, path: str | os.PathLike[str]) -> None:
    """Writes what :func:`torch.save` can, all of it or nothing.

    The new file is on the disk before it takes the old one's place, and so is its name
    before this returns. :func:`torch.load` reads it.

    Args:
        content: a nest of dicts, lists, tensors and numbers: state dicts.
        path: the file.

    Raises:
        RuntimeError: it cannot be written; an older file is as before.
    """
    path = Path(path)
    # Not into the file: what torch raises of a full disk does not say so.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    partial = path.with_name(path.name + ".partial")
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
        raise RuntimeError(f"Cannot write {path}: {error.strerror}") from error


def load(
    path: str | os.PathLike[str], device: torch.device | str | None = "cpu"
) -> Any:
    """Reads what :func:`save` or :func:`torch.save` has written, if it is whole.

    :func:`torch.load` does not look at the sums that the file has of its parts.

    Args:
        path: the file.
        device: where tensors are put. Default: the CPU.

    Raises:
        RuntimeError: it cannot be read, or a bit of it is another than was written.
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
        raise RuntimeError(
            f"Cannot read {path}: {reason or type(error).__name__}"
        ) from error
