"""Runs a program on several ranks: one_rank.py is what such programs are made of."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

__all__ = ["launch", "on_ranks"]


def launch(program: Path, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank has found and saved as FOLDER/RANK.pt."""
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(ranks), folder],
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


def on_ranks(program: Path) -> Any:
    """A fixture: what a program has found on each of two ranks, or of four."""

    @pytest.fixture(
        scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)]
    )
    def ranks(
        request: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> list[dict[str, Any]]:
        return launch(program, request.param, tmp_path_factory.mktemp("ranks"))

    return ranks
