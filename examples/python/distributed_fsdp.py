"""One chain whose parameters are spread over ranks: SGHMC under FSDP2, checkpoints too.

    torchrun --nproc-per-node 2 examples/python/distributed_fsdp.py [--out runs/fsdp]

Every rank keeps its shard of parameters, gradients and momenta, and draws its part of
the noise: the chain is that of distributed_ddp.py, up to rounding, on any number of
ranks.
Started again with more --epochs it goes on, also on another number of ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_ddp import NOISE, data, network
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import torch_sgmcmc as sg


def main() -> None:
    """Runs the chain and predicts while it runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default="runs/fsdp")
    parser.add_argument("--epochs", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")  # on GPUs "nccl"

    train = data()
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    sampler = sg.SGHMC(  # after fully_shard
        model.parameters(),
        lr=1e-3,
        momentum=0.9,
        num_data=len(train),  # of all ranks together
        prior_precision=1.0,
    )
    batches = sg.IndependentBatchSampler(
        len(train),
        60,  # n too is that of all ranks together
        seed=sampler.seed,  # on which the ranks have agreed
        num_replicas=dist.get_world_size(),
        rank=dist.get_rank(),
    )
    # Every rank predicts, with layers that are gathered one after the other.
    predictive = sg.Predictive(model, train.tensors[0], link="identity")

    done, path = 0, arguments.out / "checkpoint"
    if path.exists():
        model_state, state = get_state_dict(model, sampler)
        rest: dict[str, Any] = {"epoch": 0, "batches": batches.state_dict()}
        content = {"model": model_state, "sampler": state, "rest": rest}
        dcp.load(content, checkpoint_id=path)
        set_state_dict(
            model, sampler, model_state_dict=model_state, optim_state_dict=state
        )
        done = rest["epoch"]
        arguments.epochs = max(done, arguments.epochs)
        batches.load_state_dict(rest["batches"])
        predictive.load_state_dict(sg.load(arguments.out / "predictive.pt"))
    for epoch in range(done + 1, arguments.epochs + 1):
        for x, y in DataLoader(train, batch_sampler=batches):
            sampler.zero_grad()
            (((model(x) - y) / NOISE).square().mean() / 2).backward()
            sampler.step()
        if epoch > 50:
            predictive.update()
    model_state, state = get_state_dict(model, sampler)
    rest = {"epoch": arguments.epochs, "batches": batches.state_dict()}
    content = {"model": model_state, "sampler": state, "rest": rest}
    dcp.save(content, storage_writer=dcp.FileSystemWriter(path, overwrite=True))

    if dist.get_rank() == 0:
        sg.save(predictive.state_dict(), arguments.out / "predictive.pt")
        posterior = predictive.result()
        error = (posterior.mean - train.tensors[1]).square().mean().sqrt()
        print(f"{posterior.num_draws} draws; error of their mean {float(error):.3f}")
    dist.barrier()  # a rank that ends while gloo still has its tensors may be aborted
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
