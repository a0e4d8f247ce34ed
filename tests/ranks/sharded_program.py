"""One rank of several, over gloo: ``python sharded_program.py RANK RANKS FOLDER``.

Does what test_sharded.py looks at, and saves it as FOLDER/RANK.pt.
"""

import sharded_hmc_ranks
import sharded_ranks
import torch.distributed as dist
from one_rank import join, run
from torch.distributed.device_mesh import init_device_mesh


def main(rank, ranks, folder):
    join(rank, ranks, folder)
    meshes = {
        name: (init_device_mesh("cpu", shape), placements)
        for name, (shape, placements) in sharded_ranks.placements_of(ranks).items()
    }
    results = sharded_ranks.found(rank, ranks, meshes, folder)
    if ranks == 2:
        groups = [dist.new_group([i]) for i in range(ranks)]
        results["HMC"] = sharded_hmc_ranks.found(rank, ranks, meshes, groups)
    return results


if __name__ == "__main__":
    run(main)
