"""What computed a result: every example's results.json says so."""

import platform
from typing import Any

import torch

import torch_sgmcmc as sg

__all__ = ["versions"]


def versions() -> dict[str, Any]:
    """Versions of what numbers depend on, and the number of threads."""
    return {
        "torch": torch.__version__,
        "torch_sgmcmc": sg.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
