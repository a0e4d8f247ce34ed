"""The configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run. Two runs with equal configs are the same chain."""

    method: str
    seed: int
    settings: tuple[tuple[str, float], ...]
    epochs: int
    burn_in: int
    batch_size: int
    dataset: str
    validate: bool = False  # report the validation set instead of the test set

    @property
    def name(self) -> str:
        """A file name."""
        return f"{self.method}-seed{self.seed}"

    @property
    def samples(self) -> bool:
        """True if predictions are averaged over the posterior."""
        return self.method not in ("sgd", "sgdm")

    def as_dict(self) -> dict[str, Any]:
        """The configuration in the form of checkpoints."""
        return vars(self) | {"settings": dict(self.settings)}

    def checkpoint(self, folder: Path) -> Path:
        """The run's file."""
        return folder / f"{self.name}.pt"

    def store(self, folder: Path) -> Path:
        """The folder of the run's draws."""
        return folder / self.name
