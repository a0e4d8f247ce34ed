"""The files of a store, and the writer's side of a chain.

A file of draws is on the disk before its line in the index. A line counts once its end
is written. Format: docs/store.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_sgmcmc._impl.state_dict import replace_file, sync_folder

_FORMAT = 1
_CHAIN = re.compile(r"chain-(0|[1-9][0-9]{0,17})")
# Files of a chain and of a store, with unfinished ones: no others are ever deleted.
_PARTIAL = r"(\.[0-9-]+\.partial)?"
_OF_CHAIN = re.compile(
    rf"(lock|index\.jsonl|run\.json|draws-[0-9]{{6,}}\.safetensors){_PARTIAL}"
)
_OF_STORE = re.compile(
    rf"(report\.(md|json)|checkpoint-(0|[1-9][0-9]*)\.pt|store\.json){_PARTIAL}"
)
#: The columns of an index: numbers that belong to each draw.
COLUMNS = ("step", "lr", "temperature", "weight", "loss")
#: The dtypes of draws, by their names in safetensors.
DTYPES: dict[str, torch.dtype] = {
    **{"U64": torch.uint64, "I64": torch.int64, "F64": torch.float64},
    **{"C64": torch.complex64, "F32": torch.float32, "U32": torch.uint32},
    **{"I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"U16": torch.uint16, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}


def _unreadable(path: str | Path, reason: Any) -> NoReturn:
    raise RuntimeError(f"Cannot read {path}: {reason}")


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
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        _unreadable(path, error.strerror)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        _unreadable(path, "it is empty or damaged")
    return content


@dataclass
class StoreInfo:
    """The content of ``store.json``."""

    #: "dtype", as safetensors names it, and "shape" of each tensor of a draw.
    tensors: dict[str, dict[str, Any]]
    #: Checksums of the model's tensors that are neither sampled nor stored.
    not_sampled: dict[str, int]
    #: Settings of the chain's loss.
    likelihood: dict[str, Any] | None = None
    format: int = _FORMAT

    @classmethod
    def of(
        cls, like: Mapping[str, Tensor], not_sampled: dict[str, int], likelihood: Any
    ) -> StoreInfo:
        """Returns the content for draws of such tensors."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        tensors = {
            name: {"dtype": names[t.dtype], "shape": [*t.shape]}
            for name, t in like.items()
        }
        return cls(tensors, not_sampled, likelihood)

    @classmethod
    def read(cls, folder: Path) -> StoreInfo | None:
        """Returns the content of store.json, None if it is missing."""
        path = folder / "store.json"
        content = read_json(path)
        if content is None:
            return None
        if content.get("format") != _FORMAT:
            _unreadable(path, f"format {content.get('format')!r} (must be {_FORMAT})")
        try:
            info = cls(**content)
            for tensor in info.tensors.values():
                _ = DTYPES[tensor["dtype"]], [*map(int, tensor["shape"])]
        except (KeyError, TypeError, ValueError, AttributeError):
            _unreadable(path, "it is damaged")
        return info

    def difference(self, given: StoreInfo) -> str | None:
        """Describes the first difference to another model's draws, or returns None."""
        for name in (*self.tensors, *given.tensors):
            one, other = (
                "missing" if t is None else f"{t['dtype']} of shape {t['shape']}"
                for t in (self.tensors.get(name), given.tensors.get(name))
            )
            if one != other:
                return f"its {name!r} is {one}, here {other}"
        return None


class CorruptDrawError(RuntimeError):
    """A file of draws is missing, cut off or altered; the message names it."""


@dataclass(eq=False)
class DrawFile:
    """A file of draws and its line of the index, or draws of a chain in memory."""

    info: StoreInfo
    chain: int
    path: str
    count: int
    size: int
    crc32: int
    #: COLUMNS, and the "prior_precision" of each param group.
    columns: dict[str, Sequence[Any]]
    memory: Chain | None = None
    tensors: dict[str, Tensor] | None = None

    def read(self) -> dict[str, Tensor]:
        """Returns the tensors, [count, ...], mapped into memory."""
        if self.tensors is not None:
            return self.tensors
        try:
            size = os.stat(self.path).st_size
            if size != self.size:
                raise ValueError(f"it has {size} bytes of the {self.size} written")
            with torch.device("cpu"):  # whatever the default device is
                data = torch.from_file(self.path, size=size, dtype=torch.uint8)
                if crc32(data.numpy()) != self.crc32:
                    raise ValueError("its bytes are altered")
                tensors = safetensors.torch.load_file(self.path)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CorruptDrawError(
                f"Cannot read {self.path}: {reason} (if its chain was cut back or "
                "restarted, refresh() the store)"
            ) from error
        if self.count > 1:
            self.tensors = tensors
        return tensors

    def __getstate__(self) -> dict[str, Any]:
        kept = {"tensors": None} if self.path else {}
        return {**self.__dict__, "memory": None, **kept}


def chains_in(folder: Path) -> list[int]:
    """Returns the numbers of a store's chains."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        found = (_CHAIN.fullmatch(entry.name) for entry in entries)
        return sorted(int(match[1]) for match in found if match)
    return []


def read_index(folder: Path, chain: int, info: StoreInfo) -> list[DrawFile]:
    """Returns the files of a chain's draws, in order."""
    place = f"{folder}/chain-{chain}"
    path = f"{place}/index.jsonl"
    files: list[DrawFile] = []
    try:
        with open(path, "rb") as index:
            for line in index:
                if not line.endswith(b"\n"):
                    break  # an unfinished line
                try:
                    files.append(_parsed(line, len(files), info, chain, place))
                except (ValueError, KeyError, TypeError, OverflowError) as error:
                    _unreadable(path, f"line {len(files) + 1} is damaged ({error})")
    except FileNotFoundError:
        return []
    except OSError as error:
        _unreadable(path, error.strerror)
    return files


_LINE_SUM = b', "line_crc32": '


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


def _parsed(
    line: bytes, number: int, info: StoreInfo, chain: int, place: str
) -> DrawFile:
    start, _, checksum = line.rpartition(_LINE_SUM)
    if not start or int(checksum.rstrip(b"}\n")) != crc32(start):
        raise ValueError("its checksum is another")
    content = json.loads(start + b"}")
    name, count = content["file"], content["count"]
    if name != _file_name(number):
        raise ValueError(f"file {name!r}")
    if not isinstance(count, int) or not 0 < count < 1 << 31:
        raise ValueError(f"count {count!r}")
    columns: dict[str, Sequence[Any]] = {"step": array("q", content["step"])}
    columns |= {column: floats(content[column]) for column in COLUMNS[1:]}
    columns["prior_precision"] = [*map(floats, content["prior_precision"])]
    if any(len(column) != count for column in columns.values()):
        raise ValueError(f"not {count} numbers for {count} draws")
    sizes = int(content["bytes"]), int(content["crc32"])
    return DrawFile(info, chain, f"{place}/{name}", count, *sizes, columns)


def _file_name(number: int) -> str:
    return f"draws-{number:06d}.safetensors"


def _check_plain(name: str, tensor: Tensor) -> None:
    is_wrapper = is_traceable_wrapper_subclass(tensor)
    is_dense = tensor.layout == torch.strided and not tensor.is_meta
    if is_wrapper or tensor.is_quantized or not is_dense:
        kind = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
        if is_wrapper:
            kind = type(tensor).__name__
        raise ValueError(
            f"Invalid model: {name!r} is a {kind} (must be a strided tensor of plain "
            "numbers). Dequantize it, or write draws with a SampleWriter"
        )


def as_stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a tensor without data, with the shape and dtype of stored ones."""
    if name == "__metadata__":
        raise ValueError(f"Invalid tensors: {name!r} is a name that safetensors keeps")
    _check_plain(name, tensor)
    stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if stored not in DTYPES.values():
        known = ", ".join(map(str, DTYPES.values()))
        raise ValueError(f"Invalid tensors: {name!r} is {stored} (not of {known})")
    return torch.empty(tensor.shape, dtype=stored, device="meta")


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a checksum of each tensor's bytes."""
    sums = {}
    for name, tensor in tensors.items():
        _check_plain(name, tensor)
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        plain.copy_(tensor.detach())  # of any strides, or conjugate
        sums[name] = crc32(plain.flatten().view(torch.uint8).numpy())
    return sums


def _lock(path: Path, place: str) -> int:
    """Excludes other writers until release or the end of the process (``flock``)."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(lock, 20).decode(errors="replace").strip()
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        who = f"process {holder or 'of another machine'} writes to it"
        if holder == str(os.getpid()):
            who = "this process writes to it already"
        raise RuntimeError(f"Cannot write to {place}: {who}") from None
    _locks.add(lock)
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except BaseException:  # a full disk
        _release(lock)
        raise
    return lock


def _release(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)
    _locks.remove(lock)
    os.close(lock)


_locks: set[int] = set()


def _close_locks() -> None:
    while _locks:
        os.close(_locks.pop())


# A forked child closes its copies, or a lock would outlive its writer.
os.register_at_fork(after_in_child=_close_locks)


class Chain:
    """The writer's side of a chain, in memory."""

    def __init__(self, chain: int, info: StoreInfo, where: str = "in memory") -> None:
        self.chain, self.info, self.place = chain, info, f"chain {chain} {where}"
        self.files: list[DrawFile] = []
        self.run: Mapping[str, Any] | None = None
        self.is_open = False

    @classmethod
    def in_memory(cls, chains: dict[int, Chain], chain: int, info: StoreInfo) -> Chain:
        """Returns a chain of a store in memory for its one writer."""
        known = next(iter(chains.values())).info if chains else info
        if difference := known.difference(info):
            raise ValueError(
                f"Invalid store: its draws are of another model: {difference}"
            )
        found = chains.setdefault(chain, cls(chain, known))
        if found.is_open:
            raise RuntimeError(
                f"Cannot write to {found.place}: this process writes to it already"
            )
        found.is_open = True
        return found

    @property
    def num_draws(self) -> int:
        """The number of stored draws."""
        return sum(file.count for file in self.files)

    def add(self, tensors: dict[str, Tensor], columns: dict[str, Any]) -> None:
        """Stores the tensors and numbers of draws; an error changes nothing."""
        sizes = len(columns["step"]), 0, 0
        file = DrawFile(self.info, self.chain, "", *sizes, columns, self, tensors)
        self.files.append(file)

    def position(self) -> dict[str, int]:
        """Returns the chain's length, and a checksum."""
        return {"size": len(self.files), "crc32": self.num_draws}

    def cut_back(self, position: Mapping[str, int]) -> None:
        """Deletes draws stored after a position of this chain."""
        kept = self.files[: position["size"]]
        if sum(file.count for file in kept) != position["crc32"]:
            raise ValueError(f"Invalid checkpoint: it is not of {self.place}")
        self.files = kept

    def clear(self) -> None:
        """Deletes all draws."""
        self.files, self.run = [], None

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Writes the chain's run record beside its draws."""
        self.run = dict(content)

    def close(self) -> None:
        """Releases the chain for other writers."""
        self.is_open = False


class FolderChain(Chain):
    """The writer's side of a chain in a folder."""

    def __init__(self, store: Path, chain: int, info: StoreInfo) -> None:
        super().__init__(chain, info, f"of {store}")
        self.folder, self._given = store / f"chain-{chain}", info
        self._path = self.folder / "index.jsonl"
        with contextlib.ExitStack() as undo, _writing(self.folder):
            self.info = self._make_store(store, info)
            self.folder.mkdir(exist_ok=True)
            undo.callback(_release, _lock(self.folder / "lock", self.place))
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._index = os.open(self._path, flags, 0o666)
            undo.callback(os.close, self._index)
            sync_folder(self.folder)
            sync_folder(store)
            self._take_index()
            self._opened = undo.pop_all()

    @staticmethod
    def _make_store(store: Path, info: StoreInfo) -> StoreInfo:
        made = [p for p in (store, *store.parents) if not p.exists()]
        store.mkdir(parents=True, exist_ok=True)
        for path in made:
            sync_folder(path.parent)
        there = StoreInfo.read(store)
        indices = store.glob("chain-*/index.jsonl")
        if there is not None and any(os.path.getsize(path) > 0 for path in indices):
            if difference := there.difference(info):
                raise ValueError(
                    f"Invalid store: the draws in {store} are of another model: "
                    f"{difference}. Give restart=True, or another folder"
                )
            return there
        text = json.dumps(asdict(info), indent=1, ensure_ascii=False)
        replace_file(store / "store.json", text.encode())
        return info

    def _take_index(self) -> None:
        self.files = read_index(self.folder.parent, self.chain, self.info)
        lines = self._path.read_bytes()
        self._size = lines.rfind(b"\n") + 1
        self._crc32 = crc32(lines[: self._size])
        self._cut(self._size)
        # Other files were not finished, or were cut back.
        kept = {self.folder / name for name in ("lock", "index.jsonl", "run.json")}
        kept |= {Path(file.path) for file in self.files}
        for path in _matching(self.folder, _OF_CHAIN):
            if path not in kept:
                path.unlink()

    def _cut(self, size: int) -> None:
        if os.fstat(self._index).st_size != size:
            os.ftruncate(self._index, size)
            os.fsync(self._index)

    def add(self, tensors: dict[str, Tensor], columns: dict[str, Any]) -> None:  # noqa: D102
        path = self.folder / _file_name(len(self.files))
        data, count = safetensors.torch.save(tensors), len(columns["step"])
        sizes = {"count": count, "bytes": len(data), "crc32": crc32(data)}
        line, done = _line({"file": path.name, **sizes, **columns}), 0
        with _writing(path):
            if os.fstat(self._index).st_nlink == 0:
                raise FileNotFoundError(2, "the folder was deleted")
            replace_file(path, data)
        with _writing(self._path):
            try:
                while done < len(line):
                    done += os.pwrite(self._index, line[done:], self._size + done)
                os.fsync(self._index)
            except OSError:
                # Readers ignore a line without an end.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._index, self._size)
                raise
        # A writer of many draws does not keep their numbers.
        file = DrawFile(self.info, self.chain, str(path), *sizes.values(), {})
        # Between these there is no call, after which an interrupt could come.
        now = [*self.files, file], self._size + len(line), crc32(line, self._crc32)
        self.files, self._size, self._crc32 = now

    def position(self) -> dict[str, int]:  # noqa: D102
        # LibTorch reads only pickled ints of 32 bits, with a sign.
        signed = self._crc32 - (self._crc32 >> 31 << 32)
        return {"size": self._size, "crc32": signed}

    def cut_back(self, position: Mapping[str, int]) -> None:  # noqa: D102
        size = position["size"]
        lines = self._path.read_bytes()[:size]
        if len(lines) != size or crc32(lines) != position["crc32"] % 2**32:
            raise ValueError(f"Invalid checkpoint: it is not of {self.place}")
        self._cut(size)
        self._take_index()

    def clear(self) -> None:  # noqa: D102
        self._cut(0)
        self._take_index()
        (self.folder / "run.json").unlink(missing_ok=True)
        self.info = self._make_store(self.folder.parent, self._given)

    def write_run(self, content: Mapping[str, Any]) -> None:  # noqa: D102
        path = self.folder / "run.json"
        with _writing(path):
            replace_file(path, json.dumps(content, allow_nan=False).encode())

    def close(self) -> None:  # noqa: D102
        self._opened.close()
        self._index = -1  # the number may become another file's


def delete_all(store: Path) -> None:
    """Deletes a store's chains, checkpoints and reports, if no chain has a writer.

    The last chain goes first, and its checkpoint before its draws: draws without a
    checkpoint are refused by the next run, so it never has the rest of another's.
    """
    path = store / "store.json"
    if read_json(path) is None:
        return
    chains = {n: store / f"chain-{n}" for n in reversed(chains_in(store))}
    with contextlib.ExitStack() as locks:
        for chain, folder in chains.items():
            lock = _lock(folder / "lock", f"chain {chain} of {store}")
            locks.callback(_release, lock)
        for chain, folder in chains.items():
            (store / f"checkpoint-{chain}.pt").unlink(missing_ok=True)
            sync_folder(store)
            for file in _matching(folder, _OF_CHAIN):
                file.unlink()
            with contextlib.suppress(OSError):  # it holds other files
                folder.rmdir()
            sync_folder(store)
        for file in _matching(store, _OF_STORE):
            file.unlink()
        sync_folder(store)


def _matching(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """Returns the files of such names, sorted."""
    return sorted(path for path in folder.iterdir() if names.fullmatch(path.name))
