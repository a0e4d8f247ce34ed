"""Finished runs on disk, so that a killed program goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .logistic import Array

__all__ = ["remembered"]


def remembered(
    folder: Path, name: str, settings: Any, make: Callable[[], dict[str, Array]]
) -> dict[str, Array]:
    """What ``make`` returns, made only once for a name and settings (JSON values)."""
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    file = folder / f"{name}-{key[:16]}.npz"
    if not file.exists():
        made = make()
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"unfinished-{os.getpid()}.npz"
        np.savez(unfinished, **made)
        unfinished.replace(file)
    with np.load(file) as loaded:
        return {key: loaded[key] for key in loaded.files}
