"""Samplers that decide for all: ``python deciding_ranks.py RANK SIZE FOLDER``.

Does what test_deciding_ranks.py looks at, and saves it as FOLDER/RANK.pt.
"""

from pathlib import Path
from typing import Any

import hmc_ranks
import hmcecs_ranks
import sbps_ranks
import torch
import torch.distributed as dist
from one_rank import join, run

SAMPLERS: dict[str, Any] = {
    "HMC": hmc_ranks,
    "HMCECS": hmcecs_ranks,
    "SBPS": sbps_ranks,
}


def main(rank: int, size: int, folder: Path) -> dict[str, Any]:
    late = hmc_ranks.late_sampler(rank)
    join(rank, size, folder)
    group = [dist.new_group([i]) for i in range(size)][rank]
    results: dict[str, Any] = {
        "HMC": hmc_ranks.found(rank, size, group, late),
        "HMCECS": hmcecs_ranks.found(rank, size, group),
        "SBPS": sbps_ranks.found(rank, size, group),
    }
    for name, sampler in SAMPLERS.items():
        torch.manual_seed(20 + rank)
        results[name]["seed"] = sampler.begin(rank, size, seed=None).sampler.seed
    return results


if __name__ == "__main__":
    run(main)
