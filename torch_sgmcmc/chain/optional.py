"""Packages that only some functions need."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["optional"]


def optional(module: str, package: str, user: str, extra: str = "diagnostics") -> Any:
    """The module, or an error that says who needs it and how it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{user} needs {package}, which is not installed: pip install "
            f"'torch_sgmcmc[{extra}]'"
        ) from error
