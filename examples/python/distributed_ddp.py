"""One chain on several ranks: SGHMC where SGD + DistributedDataParallel was.

    torchrun --nproc-per-node 2 examples/python/distributed_ddp.py [--out runs/ddp]

Every rank has the gradient of its part of each minibatch, DistributedDataParallel
averages them, and all ranks make the same update with the same noise: the chain is that
of one process (--nproc-per-node 1), up to rounding. What SGD has not is marked.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torch_sgmcmc as sg

NOISE = 0.1


def data() -> TensorDataset:
    """Points of a noisy curve."""
    x = torch.linspace(-2, 2, 600)[:, None]
    g = torch.Generator().manual_seed(0)
    return TensorDataset(
        x, torch.sin(3 * x) + NOISE * torch.randn(x.shape, generator=g)
    )


def network() -> nn.Module:
    """The model."""
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def main() -> None:
    """Runs the chain and predicts with its draws."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="runs/ddp")
    parser.add_argument("--epochs", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")  # on GPUs "nccl"

    train = data()
    model = DistributedDataParallel(network())
    sampler = sg.SGHMC(
        model.parameters(),
        lr=1e-3,
        momentum=0.9,
        num_data=len(train),  # of all ranks together
        prior_precision=1.0,
        process_group=dist.group.WORLD,  # one chain: its first rank stores it
    )
    batches = sg.IndependentBatchSampler(
        len(train),
        60,  # n too is that of all ranks together
        seed=sampler.seed,  # on which the ranks have agreed
        num_replicas=dist.get_world_size(),
        rank=dist.get_rank(),
    )
    sg.check_replicas_every(sampler, 100)
    collector = sg.Collector(
        sampler, model.module, f"{arguments.out}/draws", burn_in=500, every=10
    )
    collector.restart()  # over what an earlier run has left
    for _ in range(arguments.epochs):
        for x, y in DataLoader(train, batch_sampler=batches):
            sampler.zero_grad()
            (((model(x) - y) / NOISE).square().mean() / 2).backward()
            sampler.step()
    collector.close()

    if dist.get_rank() == 0:
        x, y = train.tensors
        draws = sg.SampleStore(f"{arguments.out}/draws")
        posterior = sg.predict(network(), draws, x, link="identity")
        error = (posterior.mean - y).square().mean().sqrt()
        print(f"{len(draws)} draws; error of their mean {float(error):.3f}")
    dist.barrier()  # a rank that ends while gloo still has its tensors may be aborted
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
