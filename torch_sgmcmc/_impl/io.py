"""Checkpoints that survive a kill, a full disk and a power cut."""

from __future__ import annotations

import copy
import io
import itertools
import os
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

__all__ = [
    "load",
    "replace_file",
    "save",
    "sync_folder",
]


def save(content: Any, path: str | os.PathLike[str]) -> None:
    """Writes what :func:`load` reads, all of it or nothing.

    The new file is on the disk before it takes the old one's place, and so is its name
    before this returns. :func:`torch.load` reads it. NumPy's numbers, which a scheduler
    may have, are saved as Python's.

    Args:
        content: a nest of dicts, lists, tensors, numbers and strings: state dicts.
        path: the file.

    Raises:
        TypeError: there is something else in it, which :func:`load` would refuse; the
            message says where. An older file is as before.
        RuntimeError: it cannot be written; an older file is as before.
    """
    path = Path(path).expanduser()
    content = _plain(content, {})
    # Not into the file: what torch raises of a full disk does not say so.
    buffer = io.BytesIO()
    reason = _refusal(content, buffer)
    if reason is not None:
        raise TypeError(_words(content, reason))
    try:
        replace_file(path, buffer.getbuffer())
    except OSError as error:
        raise RuntimeError(f"Cannot write {path}: {error.strerror}") from error


_counter = itertools.count()


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Writes a file, all of it or nothing, and waits until it is on the disk.

    Raises:
        OSError: it cannot be written; an older file is as before.
    """
    # A name that no other process or thread has.
    name = f"{path.name}.{os.getpid()}-{next(_counter)}.partial"
    partial = path.with_name(name)
    try:
        with partial.open("wb") as file:
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
    """Brings the names in a folder onto the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
    path = Path(path).expanduser()
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            # torch gives its files no attributes, but leaves out what seems a folder.
            folders = [i.filename for i in archive.infolist() if i.external_attr]
        if damaged or folders:
            raise ValueError(f"{damaged or folders[0]} is damaged")
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # of many types, for files with anything in them
        text = getattr(error, "strerror", None) or str(error)
        # What torch says before this is advice to read files without looking.
        text = text.rpartition("WeightsUnpickler error: ")[2]
        reason = text.strip().split("\n")[0]
        raise RuntimeError(
            f"Cannot read {path}: {reason or type(error).__name__}"
        ) from error


def _plain(content: Any, done: dict[int, Any]) -> Any:
    """The same with NumPy's numbers as Python's; nests without any are as they are."""
    numpy = sys.modules.get("numpy")  # not needed otherwise
    if numpy is not None and isinstance(content, numpy.generic):
        return content.item()
    if id(content) in done:
        return done[id(content)]
    kind = type(content)
    if kind not in (dict, OrderedDict, list, tuple, set):
        return content
    done[id(content)] = content  # of a nest that has itself in it
    if kind in (dict, OrderedDict):
        items = {_plain(k, done): _plain(v, done) for k, v in content.items()}
        old, new = [*content, *content.values()], [*items, *items.values()]
        made = items
        if kind is OrderedDict:
            made = copy.copy(content)  # with the attributes that a module's has
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
    """Saves into a buffer; why :func:`load` would refuse that, or None."""
    try:
        torch.save(content, buffer)
        buffer.seek(0)
    except (PicklingError, AttributeError, TypeError, ValueError) as error:
        return str(error)
    return ", ".join(get_unsafe_globals_in_checkpoint(buffer)) or None


def _words(content: Any, reason: str) -> str:
    """The place and the type of what is refused."""
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
