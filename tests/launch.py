"""Runs a program on several ranks: ``python PROGRAM RANK ... FOLDER``."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

__all__ = ["launch"]


def launch(
    program: Path, ranks: int, folder: Path, *arguments: object
) -> list[dict[str, Any]]:
    """What each rank has found and saved as FOLDER/RANK.pt."""
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), *map(str, arguments), folder],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return [
        torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)
    ]
