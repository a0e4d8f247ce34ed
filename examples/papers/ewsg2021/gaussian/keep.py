"""Results that outlive a killed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reproduce import checkpoint

__all__ = ["kept"]


def kept(
    path: Path | None, config: dict[str, Any], compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What ``compute`` returns, or what an earlier call has left at path.

    Args:
        path: file, written once the result is complete; None keeps nothing.
        config: all that the result depends on. Another one in the file ends the run.
        compute: makes a dict of tensors, numbers and lists.
    """
    if path is None:
        return compute()
    if path.exists():
        saved = checkpoint.load(path)
        if saved["config"] != config:
            raise SystemExit(
                f"{path} holds results with other settings. Delete it or choose "
                "another --out."
            )
        return saved["result"]
    result = compute()
    checkpoint.save({"config": config, "result": result}, path)
    return result
