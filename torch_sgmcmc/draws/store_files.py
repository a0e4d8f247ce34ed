"""The files of a store, and the writer's side of a chain.

A file of draws is on the disk before its line in the index. A line counts once its end
is written. Format: docs/store.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import stat
import warnings
import weakref
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self
from zlib import crc32

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_sgmcmc.io import replace_file, sync_folder

_FORMAT = 1
_LINE_SUM = b', "line_crc32": '
_CHAIN = re.compile(r"chain-(0|[1-9][0-9]{0,17})")
# Files of a chain and of a store, finished or not: no others are ever deleted.
_OF_CHAIN = re.compile(r"lock|index\.jsonl|run\.json|draws-[0-9]{6,}\.safetensors")
_OF_STORE = re.compile(r"report\.(md|json)|checkpoint-(0|[1-9][0-9]*)\.pt|store\.json")
# A file of sample() has one of these in its beginning.
_MARKS = {
    ".pt": (b"group 0 has ", b"random_cuda"),
    ".md": (b"# What was sampled",),
    ".json": (b'"convergence": ',),
}
_PARTIAL = re.compile(r"\.[0-9-]+\.partial\Z")
#: The columns of an index: numbers that belong to each draw.
COLUMNS = ("step", "lr", "temperature", "weight", "loss")
#: The dtypes of draws, by their names in safetensors.
DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# Errors of contents; RecursionError is of deep JSON.
_DAMAGE = ValueError, KeyError, TypeError, OverflowError, AttributeError, RecursionError


@contextlib.contextmanager
def _reading(path: str | Path, part: str = "it") -> Iterator[None]:
    """Turns errors of a file and its content into a RuntimeError that names it."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"Cannot read {path}: {error.strerror}") from error
    except _DAMAGE as error:
        message = f"Cannot read {path}: {part} is damaged ({error})"
        raise RuntimeError(message) from error


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a RuntimeError that names the file."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        raise RuntimeError(f"Cannot write {place}: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a file, None if the file is missing."""
    with _reading(path), contextlib.suppress(FileNotFoundError):
        with _open(path) as file:
            return dict(json.loads(file.read()))
    return None


def _open(path: str | Path) -> BinaryIO:
    """Opens a file to read it: a FIFO would wait for a writer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return open(path, "rb")


@dataclass
class StoreInfo:
    """The content of ``store.json``."""

    tensors: dict[str, dict[str, Any]]  # "dtype", as safetensors names it, and "shape"
    not_sampled: dict[str, int | None]  # checksums; None of tensors that are sampled
    likelihood: dict[str, Any] | None = None  # settings
    format: int = _FORMAT

    @classmethod
    def read(cls, folder: Path) -> StoreInfo | None:
        """Returns the content of store.json, None if it is missing."""
        path = folder / "store.json"
        if (content := read_json(path)) is None:
            return None
        if content.get("format") != _FORMAT:
            found = f"format {content.get('format')!r} (must be {_FORMAT})"
            raise RuntimeError(f"Cannot read {path}: {found}")
        with _reading(path):
            info = cls(**content)
            for tensor in info.tensors.values():
                _ = DTYPES[tensor["dtype"]], [*map(int, tensor["shape"])]
        return info

    def check_same(self, given: StoreInfo, where: str) -> None:
        """Raises if another model has the draws; warns of other unsampled tensors."""
        for name in (*self.tensors, *given.tensors):
            there, here = (i.tensors.get(name, "missing") for i in (self, given))
            if there != here:
                raise ValueError(
                    f"Invalid store: the draws {where} are of another model: its "
                    f"{name!r} is {there}, here {here} (delete them, or use another)"
                )
        others = sorted(dict(self.not_sampled.items() - given.not_sampled.items()))
        if others:
            warnings.warn(
                f"draws {where} are of a part of the model, whose other parameters "
                f"have changed since: {len(others)}, among them {others[0]!r}",
                stacklevel=6,
            )


class CorruptDrawError(RuntimeError):
    """A file of draws is missing, cut off or altered; the message names it."""


@dataclass(eq=False)
class DrawFile:
    """A file of draws and its line of the index, or draws of a chain in memory."""

    info: StoreInfo
    chain: int
    path: str | None  # None in memory
    count: int
    size: int
    crc32: int
    columns: dict[str, Sequence[Any]]  # COLUMNS and "prior_precision" of each draw
    end: tuple[int, int]  # bytes of the index to the end of this line, their CRC-32
    tensors: dict[str, Tensor] = field(default_factory=dict)  # empty: not read yet
    run: dict[str, Any] = field(default_factory=dict)  # the chain's record, in memory

    def read(self) -> dict[str, Tensor]:
        """Returns the tensors, [count, ...], mapped into memory."""
        if self.path is None:
            return self.tensors
        try:
            # Each time: access beyond the end of a mapped file ends the process.
            size = os.stat(self.path).st_size
            if size != self.size:
                raise ValueError(f"it has {size} bytes of the {self.size} written")
            if self.tensors:
                return self.tensors
            with torch.device("cpu"):  # whatever the default device is
                data = torch.from_file(self.path, size=size, dtype=torch.uint8)
                if crc32(data.numpy().data) != self.crc32:
                    raise ValueError("its bytes are altered")
                tensors = safetensors.torch.load_file(self.path)
            self._check(tensors)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CorruptDrawError(
                f"Cannot read {self.path}: {reason} (if its chain was cut back or "
                "restarted, refresh() the store)"
            ) from error
        if self.count > 1:
            self.tensors = tensors
        return tensors

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises unless tensors are as store.json and the index describe them."""
        found = {
            k: f"{DTYPE_NAMES.get(t.dtype)} {[*t.shape]}" for k, t in tensors.items()
        }
        wanted = {
            k: f"{t['dtype']} {[self.count, *t['shape']]}"
            for k, t in self.info.tensors.items()
        }
        for name in {**found, **wanted}:
            there, here = (of.get(name, "missing") for of in (found, wanted))
            if there != here:
                raise ValueError(f"its {name!r} is {there}, in store.json {here}")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if self.path is None else {**self.__dict__, "tensors": {}}


def chains_in(folder: str | Path) -> list[int]:
    """Returns the numbers of a store's chains."""
    with _reading(folder):
        found = map(_CHAIN.fullmatch, os.listdir(folder))
        return sorted(int(match[1]) for match in found if match)


def read_index(folder: str | Path, chain: int, info: StoreInfo) -> list[DrawFile]:
    """Returns the files of a chain's draws, in order."""
    place = f"{folder}/chain-{chain}"
    path = f"{place}/index.jsonl"
    files: list[DrawFile] = []
    missing = contextlib.suppress(FileNotFoundError)
    with _reading(path), missing, _open(path) as index:
        for line in index:
            if not line.endswith(b"\n"):
                break  # an unfinished line
            with _reading(path, f"line {len(files) + 1}"):
                name, count, size, crc, columns = _parsed(line, len(files))
            end, where = end_of(files, line), f"{place}/{name}"
            files.append(DrawFile(info, chain, where, count, size, crc, columns, end))
    return files


def end_of(files: Sequence[DrawFile], line: bytes = b"") -> tuple[int, int]:
    """Returns the bytes of an index of some files and a line, and their CRC-32."""
    size, checksum = files[-1].end if files else (0, 0)
    return size + len(line), crc32(line, checksum)


def _line(content: Mapping[str, Any]) -> bytes:
    """Returns a line of an index: a JSON object that ends with the line's checksum."""
    start = json.dumps(finite(content), allow_nan=False).encode()[:-1]
    return start + _LINE_SUM + b"%d}\n" % crc32(start)


def finite(value: Any) -> Any:
    """Returns a form for JSON, in which null replaces numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple | array):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def floats(values: Iterable[float | None]) -> array[float]:
    """Returns numbers of JSON, NaN for null."""
    return array("d", (math.nan if x is None else x for x in values))


def _parsed(line: bytes, number: int) -> tuple[Any, ...]:
    """Returns the file's name, count, size and checksum, and the draws' columns."""
    start, _, checksum = line.rpartition(_LINE_SUM)
    if not start or int(checksum.rstrip(b"}\n")) != crc32(start):
        raise ValueError("its checksum is another")
    content = json.loads(start + b"}")
    name, count = content["file"], content["count"]
    if name != _file_name(number):
        raise ValueError(f"file {name!r}")
    columns: dict[str, Sequence[Any]] = {"step": array("q", content["step"])}
    columns |= {column: floats(content[column]) for column in COLUMNS[1:]}
    columns["prior_precision"] = [(*floats(x),) for x in content["prior_precision"]]
    if type(count) is not int or {*map(len, columns.values())} != {count or -1}:
        raise ValueError(f"count {count!r}")
    return name, count, int(content["bytes"]), int(content["crc32"]), columns


def _file_name(number: int) -> str:
    return f"draws-{number:06d}.safetensors"


def as_stored(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor without data, of a stored tensor's shape and dtype."""
    is_wrapper = is_traceable_wrapper_subclass(tensor) or tensor.is_quantized
    if is_wrapper or tensor.layout != torch.strided or tensor.is_meta:
        kind = f"{tensor.layout} {type(tensor).__name__} of {tensor.dtype}"
        raise ValueError(
            f"Invalid model: {name!r} is a {kind} on {tensor.device} (must be a "
            "strided tensor of plain numbers: dequantize it, or leave it out by "
            "parameters='sampled')"
        )
    stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=stored, device="meta")


def described(name: str, tensor: Tensor) -> dict[str, Any]:
    """Returns a tensor's entry in store.json."""
    if name == "__metadata__":
        raise ValueError(f"Invalid tensors: {name!r} is a name that safetensors keeps")
    if tensor.dtype not in DTYPE_NAMES:
        known = ", ".join(map(str, DTYPE_NAMES))
        raise ValueError(
            f"Invalid tensors: {name!r} is {tensor.dtype} (not of {known})"
        )
    return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape]}


def checksums(tensors: Mapping[str, Tensor | None]) -> dict[str, int | None]:
    """Returns a checksum of each tensor's bytes, without tensors made of others."""
    sums: dict[str, int | None] = {k: None for k, t in tensors.items() if t is None}
    for name, tensor in tensors.items():
        # Quantized weights are tensors made of others.
        if tensor is None or is_traceable_wrapper_subclass(tensor):
            continue
        plain = torch.empty_like(as_stored(name, tensor), device="cpu")
        plain.copy_(tensor.detach())  # of any strides, or conjugate
        sums[name] = crc32(plain.flatten().view(torch.uint8).numpy().data)
    return sums


@contextlib.contextmanager
def _locked(store: Path, chain: int) -> Iterator[None]:
    """Excludes other writers, until the process ends at the latest (``flock``)."""
    with (store / f"chain-{chain}" / "lock").open("ab+", buffering=0) as lock:
        _locks.add(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock.fileno(), 20, 0).decode(errors="replace").strip()
            who = f"process {holder or 'of another machine'} writes to it"
            if holder == str(os.getpid()):
                who = "this process writes to it already"
            message = f"Cannot write to chain {chain} of {store}: {who}"
            raise RuntimeError(message) from None
        try:
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), b"%d\n" % os.getpid())
            yield
        finally:
            if not lock.closed and fcntl is not None:  # a fork, or Python ends
                fcntl.flock(lock, fcntl.LOCK_UN)


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
# A forked child closes its copies, or a lock would outlive its writer.
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _locks])


class MemoryChain:
    """The writer's side of a chain in memory, which takes over from an earlier one."""

    info: StoreInfo
    files: list[DrawFile]
    is_open: bool

    def __init__(self, chains: dict[int, Self], chain: int, info: StoreInfo) -> None:
        self.chain, self.place, self._given = chain, f"chain {chain} in memory", info
        known = (c.info for c in chains.values() if c.files or c.is_open)
        self.info = next(known, info)
        self.info.check_same(info, "in memory")
        earlier = chains.get(chain)
        if earlier is not None and earlier.is_open:
            raise RuntimeError(
                f"Cannot write to {self.place}: this process writes to it already"
            )
        self.files = earlier.files if earlier else []
        self.run: dict[str, Any] = earlier.run if earlier else {}
        chains[chain], self.is_open = self, True

    def add(self, tensors: dict[str, Tensor], columns: dict[str, Any]) -> None:
        """Stores the tensors and numbers of draws; an error changes nothing."""
        count, end = len(columns["step"]), end_of(self.files, _line(columns))
        file = DrawFile(
            self.info, self.chain, None, count, 0, 0, columns, end, tensors, self.run
        )
        self.files = [*self.files, file]  # no call, after which an interrupt could come

    def keep(self, files: list[DrawFile]) -> None:
        """Deletes all but the first files; the chain begins again without any."""
        self.files = files
        if not files:
            self.info, self.run = self._given, {}

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Writes the chain's run record beside its draws."""
        self.run.update(content)

    def close(self) -> None:
        """Releases the chain for other writers."""
        self.is_open = False


class FolderChain:
    """The writer's side of a chain in a folder, with the methods of a MemoryChain."""

    info: StoreInfo
    files: list[DrawFile]

    def __init__(self, store: Path, chain: int, info: StoreInfo) -> None:
        self.chain, self.place, self._given = chain, f"chain {chain} of {store}", info
        self.folder, self.is_open = store / f"chain-{chain}", True
        path = self.folder / "index.jsonl"
        with contextlib.ExitStack() as undo, _writing(self.folder):
            _make_folder(store)
            with _opening(store):
                self.info = _make_store(store, info)
                self.folder.mkdir(exist_ok=True)
                undo.enter_context(_locked(store, chain))
            self._index = undo.enter_context(path.open("ab+", buffering=0))
            sync_folder(self.folder)
            sync_folder(store)
            self.keep(read_index(store, chain, self.info))
            self._opened = undo.pop_all()

    def add(self, tensors: dict[str, Tensor], columns: dict[str, Any]) -> None:  # noqa: D102
        path = self.folder / _file_name(len(self.files))
        data, count = safetensors.torch.save(tensors), len(columns["step"])
        size, crc = len(data), crc32(data)
        sizes = {"count": count, "bytes": size, "crc32": crc}
        line = rest = _line({"file": path.name, **sizes, **columns})
        with _writing(path):
            if os.fstat(self._index.fileno()).st_nlink == 0:
                raise FileNotFoundError(2, "the folder was deleted")
            # An interrupted or failed write may have left a line.
            os.ftruncate(self._index.fileno(), end_of(self.files)[0])
            replace_file(path, data)
        with _writing(self.folder / "index.jsonl"):
            while rest:
                rest = rest[os.write(self._index.fileno(), rest) :]
            os.fsync(self._index)
        # A writer of many draws does not keep their numbers.
        end = end_of(self.files, line)
        file = DrawFile(self.info, self.chain, str(path), count, size, crc, {}, end)
        self.files = [*self.files, file]  # no call, after which an interrupt could come

    def keep(self, files: list[DrawFile]) -> None:  # noqa: D102
        self.files = files
        os.ftruncate(self._index.fileno(), end_of(files)[0])
        os.fsync(self._index)
        kept = {"lock", "index.jsonl", *map(_file_name, range(len(files)))}
        _delete(self.folder, _OF_CHAIN, kept | ({"run.json"} if files else set()))
        if not files:
            with _opening(self.folder.parent):
                self.info = _make_store(self.folder.parent, self._given, self.chain)

    def write_run(self, content: Mapping[str, Any]) -> None:  # noqa: D102
        path = self.folder / "run.json"
        with _writing(path):
            replace_file(path, json.dumps(content, allow_nan=False).encode())

    def close(self) -> None:  # noqa: D102
        self.is_open = False
        self._opened.close()


def _make_folder(store: Path) -> None:
    made = [p for p in (store, *store.parents) if not p.exists()]
    store.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync_folder(path.parent)


@contextlib.contextmanager
def _opening(store: Path) -> Iterator[None]:
    """Waits for others that open, restart or delete chains, and excludes them."""
    folder = os.open(store, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # also of a fork's copy
        os.close(folder)


def _is_held(path: Path) -> bool:
    """Returns whether a chain has a writer, from its lock."""
    with path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _make_store(store: Path, info: StoreInfo, own: int | None = None) -> StoreInfo:
    """Makes a store of such draws; returns what its store.json has then.

    Draws and writers, except for the writer of the chain ``own``, keep store.json.
    """
    there = StoreInfo.read(store)
    indices, locks = store.glob("chain-*/index.jsonl"), store.glob("chain-*/lock")
    others = (path for path in locks if path.parent.name != f"chain-{own}")
    is_used = any(os.path.getsize(p) > 0 for p in indices) or any(map(_is_held, others))
    if there is not None and is_used:
        there.check_same(info, f"in {store}")
        return there
    text = json.dumps(asdict(info), indent=1, ensure_ascii=False)
    replace_file(store / "store.json", text.encode())
    return info


def check_files(store: Path) -> None:
    """Raises if somebody else's file has a name of the files that sample() writes."""
    for path in sorted(store.glob("*")):
        if not _OF_STORE.fullmatch(path.name) or path.name == "store.json":
            continue
        head = b""
        with contextlib.suppress(OSError), _open(path) as file:
            head = file.read(1 << 20)
        if not any(mark in head for mark in _MARKS[path.suffix]):
            raise ValueError(
                f"Invalid store: {path} was not written by sample(), which would "
                "replace it (must be moved, or give another folder)"
            )


def delete_all(store: Path) -> None:
    """Deletes a store's chains, checkpoints and reports, if no chain has a writer.

    The last chain goes first, and its checkpoint before its draws: draws without a
    checkpoint are refused by the next run, so it never has the rest of another's.
    """
    if read_json(store / "store.json") is None:
        return
    chains = [*reversed(chains_in(store))]
    with contextlib.ExitStack() as locks:
        locks.enter_context(_opening(store))
        for chain in chains:
            locks.enter_context(_locked(store, chain))
        for chain in chains:
            (store / f"checkpoint-{chain}.pt").unlink(missing_ok=True)
            sync_folder(store)
            _delete(store / f"chain-{chain}", _OF_CHAIN)
            with contextlib.suppress(OSError):  # it holds other files
                (store / f"chain-{chain}").rmdir()
            sync_folder(store)
        _delete(store, _OF_STORE)
        sync_folder(store)


def _delete(folder: Path, names: re.Pattern[str], kept: Collection[str] = ()) -> None:
    """Deletes the files of such names in order, except for kept ones."""
    for path in sorted(folder.iterdir()):
        if names.fullmatch(_PARTIAL.sub("", path.name)) and path.name not in kept:
            path.unlink()
