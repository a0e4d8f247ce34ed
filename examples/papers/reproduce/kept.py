"""Finished pieces of an experiment: a killed program goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from . import checkpoint

Result = TypeVar("Result")


def kept(folder: Path, name: str, settings: Any, make: Callable[[], Result]) -> Result:
    """Returns the result of ``make``, computed once and then read from a file.

    Args:
        folder: of the files.
        name: of the piece.
        settings: all that it depends on, as JSON has it: others are another piece.
        make: makes dicts and lists of tensors, numbers and text.
    """
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    path = folder / f"{name}-{key[:16]}.pt"
    if path.exists():
        return checkpoint.load(path)
    made = make()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(made, path)
    return made


def kept_arrays(
    folder: Path, name: str, settings: Any, make: Callable[[], dict[str, Any]]
) -> dict[str, np.ndarray]:
    """The same of a dict of arrays and numbers, which are arrays afterwards."""

    def tensors() -> dict[str, torch.Tensor]:
        return {
            name: value if torch.is_tensor(value) else torch.from_numpy(np.array(value))
            for name, value in make().items()
        }

    return {k: v.numpy() for k, v in kept(folder, name, settings, tensors).items()}
