"""Results that outlive a killed run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["kept"]


def kept(
    path: Path | None, config: dict[str, Any], compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What ``compute`` returns, or what an earlier call has left at path.

    Args:
        path: file, written by rename once the result is complete; None keeps nothing.
        config: all that the result depends on. Another one in the file ends the run.
        compute: makes a dict of tensors, numbers and lists.
    """
    if path is None:
        return compute()
    if path.exists():
        saved = torch.load(path, weights_only=True)
        if saved["config"] != config:
            raise SystemExit(
                f"{path} holds results with other settings. Delete it or choose "
                "another --out."
            )
        return saved["result"]
    result = compute()
    partial = path.with_suffix(".partial")
    torch.save({"config": config, "result": result}, partial)
    os.replace(partial, path)
    return result
