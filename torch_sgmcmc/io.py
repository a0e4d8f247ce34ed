"""Files: complete or not written, and read without executing code."""

from __future__ import annotations

import copy
import errno
import io
import itertools
import os
import stat
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from pickle import PicklingError
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint


def save(content: Any, path: str | os.PathLike[str]) -> None:
    """Writes a file for :func:`load`, completely or not at all.

    The new file is on the disk before it replaces the old one, and its name is on the
    disk before this returns. :func:`torch.load` reads it. NumPy's numbers, which a
    scheduler may have, are saved as Python's.

    Args:
        content: a nest of dicts, lists, tensors, numbers and strings: state dicts.
        path: the file. A symbolic link stays one, and an older file's mode is kept.

    Raises:
        TypeError: the content has an object that :func:`load` would refuse; the message
            names its place. An older file is unchanged.
        RuntimeError: the file cannot be written, or the path is not a regular file's.
            An older file is unchanged.
    """
    path = Path(path).expanduser()
    content = _plain(content, {})
    # Not into the file: torch's error for a full disk does not name the reason.
    buffer = io.BytesIO()
    reason = _refusal(content, buffer)
    if reason is not None:
        raise TypeError(_describe(content, reason))
    try:
        replace_file(path, buffer.getbuffer())
    except OSError as error:
        raise RuntimeError(f"Cannot write {path}: {error.strerror}") from error


_counter = itertools.count()


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Writes a file, completely or not at all, and waits until it is on the disk.

    A link stays, and its target is replaced; the file keeps its mode.
    """
    path, mode = Path(os.path.realpath(path)), None
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    # No other process or thread has this name.
    name = f"{path.name}.{os.getpid()}-{next(_counter)}.partial"
    partial = path.with_name(name)
    try:
        with partial.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def sync_folder(path: Path) -> None:
    """Writes the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(
    path: str | os.PathLike[str], device: torch.device | str | None = "cpu"
) -> Any:
    """Reads a file of :func:`save` or :func:`torch.save`, if it is intact.

    Unlike :func:`torch.load`, compares the checksums in the file.

    Args:
        path: the file.
        device: the device of tensors. Default: the CPU.

    Raises:
        RuntimeError: the file cannot be read, or is damaged.
    """
    path = Path(path).expanduser()
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            # torch's files have no attributes; torch skips entries marked as folders.
            folders = [i.filename for i in archive.infolist() if i.external_attr]
        if damaged or folders:
            raise ValueError(f"{damaged or folders[0]} is damaged")
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # of many types, depending on the file's content
        text = getattr(error, "strerror", None) or str(error)
        # torch's text before this advises to disable checks.
        text = text.rpartition("WeightsUnpickler error: ")[2]
        reason = text.strip().split("\n")[0]
        raise RuntimeError(
            f"Cannot read {path}: {reason or type(error).__name__}"
        ) from error


def _plain(content: Any, done: dict[int, Any]) -> Any:
    """Converts NumPy's numbers to Python's; returns nests without any unchanged."""
    numpy = sys.modules.get("numpy")  # not needed otherwise
    if numpy is not None and isinstance(content, numpy.generic):
        return content.item()
    if id(content) in done:
        return done[id(content)]
    kind = type(content)
    if kind not in (dict, OrderedDict, list, tuple, set):
        return content
    done[id(content)] = content  # for a nest that contains itself
    if kind in (dict, OrderedDict):
        items = {_plain(k, done): _plain(v, done) for k, v in content.items()}
        old, new = [*content, *content.values()], [*items, *items.values()]
        made = items
        if kind is OrderedDict:
            made = copy.copy(content)  # keeps the attributes of a module's state dict
            made.clear()
            made.update(items)
    else:
        old = [*content]
        new = [_plain(value, done) for value in old]
        made = kind(new)
    if any(one is not other for one, other in zip(old, new, strict=True)):
        done[id(content)] = made
    return done[id(content)]


def _refusal(content: Any, buffer: io.BytesIO) -> str | None:
    """Saves into a buffer; returns why :func:`load` would refuse it, or None."""
    try:
        torch.save(content, buffer)
        buffer.seek(0)
    except (PicklingError, AttributeError, TypeError, ValueError) as error:
        return str(error)
    return ", ".join(get_unsafe_globals_in_checkpoint(buffer)) or None


def _describe(content: Any, reason: str) -> str:
    place = "content"
    while True:
        for step, part in _parts(content):
            found = _refusal(part, io.BytesIO())
            if found is not None:
                place, content, reason = place + step, part, found
                break
        else:
            kind = type(content)
            return (
                f"Invalid content: {place} is a {kind.__module__}.{kind.__qualname__}, "
                f"which load() would refuse ({reason}): save tensors, numbers, strings "
                "and dicts, lists and tuples of them"
            )


def _parts(content: Any) -> Iterator[tuple[str, Any]]:
    if type(content) in (dict, OrderedDict):
        yield from ((f"[{key!r}]", value) for key, value in content.items())
        yield from (("'s key", key) for key in content)
    elif type(content) in (list, tuple):
        yield from ((f"[{i}]", value) for i, value in enumerate(content))
