"""Several chains in one job, each on one or several ranks, and whether they agree.

    torchrun --nproc-per-node 4 examples/python/distributed_chains.py [--chains 2]

A chain on each rank, or fewer chains of several ranks each: two of two here, on a mesh
of chains × replicas. Killed and started again, all chains go on to the same draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from distributed_ddp import NOISE, data, network
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torch_sgmcmc as sg


def main() -> None:
    """Begins or resumes the chains, and compares them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/chains"))
    parser.add_argument("--chains", type=int, help="default: as many as ranks")
    parser.add_argument("--steps", type=int, default=20_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # on GPUs "nccl", and a mesh of "cuda"
    chains = arguments.chains or dist.get_world_size()
    shape = (chains, dist.get_world_size() // chains)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("chain", "replica"))
    chain, replica = mesh.get_coordinate()
    replicas = mesh.get_group("replica")  # the ranks that sample this chain

    x, y = data().tensors
    seed = sg.fold_in(0, chain)
    torch.manual_seed(seed)  # chains begin at different places
    model = DistributedDataParallel(network(), process_group=replicas)
    sampler = sg.SGHMC(
        model.parameters(),
        lr=1e-3,
        momentum=0.9,
        num_data=len(x),
        prior_precision=1.0,
        seed=seed,
        process_group=replicas,
    )
    batches = sg.IndependentBatchSampler(
        len(x), 60, seed=seed, num_replicas=shape[1], rank=replica
    )
    collector = sg.Collector(
        sampler,
        model.module,
        arguments.out / "draws",
        chain=chain,
        burn_in=arguments.steps // 5,
        every=10,
    )
    parts = {
        "model": model.module,
        "sampler": sampler,
        "batches": batches,
        "collector": collector,
    }
    checkpoint = arguments.out / f"chain-{chain}.pt"
    if checkpoint.exists():
        for name, state in sg.load(checkpoint).items():
            parts[name].load_state_dict(state)
    else:
        collector.restart()
    for step in range(batches.num_drawn + 1, arguments.steps + 1):
        rows = batches.draw(1)[0]
        sampler.zero_grad()
        (((model(x[rows]) - y[rows]) / NOISE).square().mean() / 2).backward()
        sampler.step()
        if step % (arguments.steps // 10) == 0:
            sg.check_replicas(sampler)
            state = {name: part.state_dict() for name, part in parts.items()}
            if replica == 0:
                sg.save(state, checkpoint)
    collector.close()

    dist.barrier()  # all chains are stored
    if dist.get_rank() == 0:
        store = sg.SampleStore(arguments.out / "draws")
        print(sg.report(model.module, store, x, link="identity"))
        print(store)
    dist.barrier()  # a rank that ends while gloo still has its tensors may be aborted
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
