"""Checkpoints, and folders of one run, for programs that say what is wrong and end."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import torch_sgmcmc as sg


class Parts(dict[str, Any]):
    """By name, what has a state dict: together they have one, too."""

    def state_dict(self) -> dict[str, Any]:
        """That of each part, by name."""
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
    """What a run has saved, None if it has not begun: a dict with its ``config``.

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
