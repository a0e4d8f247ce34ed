"""Checkpoints, and folders of one run, for programs that say what is wrong and end."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import torch_sgmcmc as sg


class Parts(dict[str, Any]):
    """Objects with a state dict, by name; together they have one, too."""

    def state_dict(self) -> dict[str, Any]:
        """The state of each part, by name."""
        return {name: dict(part.state_dict()) for name, part in self.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the parts; the state may have more."""
        for name, part in self.items():
            part.load_state_dict(state[name])


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


def of_run(
    path: Path, config: dict[str, Any], device: torch.device | str = "cpu"
) -> dict[str, Any] | None:
    """Returns a run's checkpoint, None if it has not begun: a dict with ``config``.

    A file that is damaged, or another run's, ends the program. Runs that differ in
    their number of epochs are one.
    """
    if not path.exists():
        return None
    saved = load(path, device)
    if not isinstance(saved, dict) or not isinstance(saved.get("config"), dict):
        raise SystemExit(f"{path} holds no run.\nDelete it or choose another --out.")
    if saved["config"] | {"epochs": 0} != config | {"epochs": 0}:
        raise SystemExit(
            f"{path} holds a run with other settings:\n  {saved['config']}\nnot\n"
            f"  {config}\nDelete it or choose another --out."
        )
    return saved


def epochs(
    path: Path,
    config: dict[str, Any],
    chain: Any,
    state: dict[str, Any],
    total: int,
    *,
    every: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Counts the epochs of a run that are still to be made, from 1 to ``total``.

    A run that is killed goes on from its last checkpoint.

    Args:
        path: of the checkpoint.
        config: what the run depends on.
        chain: what has a state dict.
        state: what else is to be kept, and what of it was is there afterwards; it gets
            the last ``epoch``, and ``config``.
        total: the number of epochs.
        every: from one checkpoint to the next; the last epoch has one.
        device: to which tensors are read.
    """
    state |= {"config": config, "epoch": 0}
    saved = of_run(path, config, device)
    if saved is not None:
        try:
            chain.load_state_dict(saved)
            state |= {key: saved[key] for key in state} | {"config": config}
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise SystemExit(
                f"{path} does not fit: {error}\nDelete it or choose another --out."
            ) from error
    rest = range(state["epoch"] + 1, total + 1)
    done = min(state["epoch"], total)
    for epoch in tqdm(rest, path.stem, total, initial=done, unit="epoch"):
        yield epoch
        state["epoch"] = epoch
        if epoch % every == 0 or epoch == total:
            save(state | chain.state_dict(), path)


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
