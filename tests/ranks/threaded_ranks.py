"""Four ranks in the threads of one process, of which the first has another seed.

Their mesh is of two by two: some share no group with the first.
"""

import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

import torch_sgmcmc as sg

torch._C._distributed_c10d._set_thread_isolation_mode(True)
_install_threaded_pg()
store, said = dist.HashStore(), {}


def work(rank):
    dist.init_process_group("threaded", rank=rank, world_size=4, store=store)
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate(), Shard(0)]
    p = DTensor.from_local(torch.zeros(2, 3), mesh, placements, run_check=False)
    try:
        sg.SGLD([torch.nn.Parameter(p)], 0.1, num_data=2, seed=7 if rank == 0 else 8)
    except RuntimeError as error:
        said[rank] = "seeds [7, 8]" in str(error)


ranks = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join(60)
print(sorted(said.items()))
