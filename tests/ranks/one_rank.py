"""What a program is made of that launch() runs on each rank.

``python PROGRAM RANK RANKS FOLDER``: what ``main(rank, ranks, folder)`` returns, having
called ``join``, is saved as FOLDER/RANK.pt.
"""

import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["join", "run"]


def join(rank: int, ranks: int, folder: Path) -> None:
    """Begins the group of all ranks: gloo, over the loopback."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )


def run(main: Callable[[int, int, Path], dict[str, Any]]) -> None:
    """Runs a rank, saves what it has found, and leaves with the others."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    found = main(rank, ranks, folder)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
