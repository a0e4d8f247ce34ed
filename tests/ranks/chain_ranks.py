"""One rank of several, over gloo: ``python chain_ranks.py RANK SIZE FOLDER``.

Does what test_distributed_chains.py looks at, and saves it as FOLDER/RANK.pt.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_rank import join, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from two_ranks import COMMON, KINDS, chain, refusal

import torch_sgmcmc as sg
from torch_sgmcmc.judge.convergence import RunningConvergence

STEPS = 20
NUM_DATA = 48


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(NUM_DATA, 3, generator=torch.Generator().manual_seed(1)).double()
    return x, x[:, :2].tanh()


def train(
    model: nn.Module,
    sampler: sg.Sampler,
    batches: sg.IndependentBatchSampler,
    after: Callable[[], object] = lambda: None,
) -> None:
    x, y = data()

    def closure() -> torch.Tensor:
        rows = batches.draw(1)[0]
        sampler.zero_grad()
        loss = (model(x[rows]) - y[rows]).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        sampler.step(closure)
        after()


def one_chain(kind: str, rank: int, size: int) -> list[torch.Tensor]:
    """A chain of all ranks, or with one of them, of one process without a group."""
    model: nn.Module = network()
    if size > 1:
        model = DDP(model)
    settings = {**COMMON, "num_data": NUM_DATA}
    sampler = KINDS[kind](model.parameters(), **settings, seed=7)
    batches = sg.IndependentBatchSampler(
        *(NUM_DATA, 12), seed=sampler.seed, num_replicas=size, rank=rank
    )
    train(model, sampler, batches)
    return [p.detach().clone() for p in model.parameters()]


def side_by_side(chains: int, folder: Path) -> dict[str, Any]:
    """So many chains, each of as many ranks as there are for it."""
    replicas = dist.get_world_size() // chains
    mesh = init_device_mesh(
        "cpu", (chains, replicas), mesh_dim_names=("chain", "replica")
    )
    index, replica = mesh.get_coordinate()
    group = mesh.get_group("replica")
    model = DDP(network(), process_group=group)
    torch.manual_seed(replica)  # as all chains do
    sampler = sg.SGHMC(model.parameters(), **COMMON, process_group=group)
    batches = sg.IndependentBatchSampler(
        *(NUM_DATA, 12), seed=sampler.seed, num_replicas=replicas, rank=replica
    )
    running = RunningConvergence(chains, 2) if chains > 1 else None
    sg.check_replicas_every(sampler, 5)
    with sg.Collector(
        sampler, model.module, folder / f"draws-{chains}", chain=index, every=5
    ) as collector:
        assert replica == 0 or collector.num_draws == 0

        def after() -> None:
            if running is not None:
                running.update(model.module[2].bias, chain=index)

        train(model, sampler, batches, after)
        state = collector.state_dict()
        collector.load_state_dict(state)
        found = {"draws": collector.num_draws, "position": state["position"]}
    theta = nn.Parameter(torch.ones(3))
    found |= {
        "chain": (index, replica),
        "sampler": chain(model, sampler),
        "refused": refusal(
            partial(sg.PSGLD, [theta], **COMMON, seed=1, process_group=group)
        ),
    }
    if running is not None:
        all_chains = running.gathered(mesh.get_group("chain"))
        found |= {"own": running.state_dict(), "all": all_chains.state_dict()}
        found["report"] = all_chains.report().rhat
    return found


def two_vectors(steps: int) -> tuple[list[nn.Parameter], sg.Sampler]:
    params = [nn.Parameter(torch.arange(4.0) + i) for i in range(2)]
    sampler = sg.SGHMC(params, **COMMON, resample_momentum_every=20)
    for p in params:
        p.grad = torch.ones(4)
    for _ in range(steps):
        sampler.step()
    return params, sampler


def flip(tensor: torch.Tensor, bit: int) -> None:
    tensor.detach().view(torch.int32)[2] ^= 1 << bit


def differences(rank: int) -> dict[str, str]:
    """What check_replicas() says once a rank has been altered."""
    last = dist.get_world_size() - 1

    def alter(kind: str, params: list[nn.Parameter], sampler: sg.Sampler) -> None:
        group, (p, q) = sampler.param_groups[0], params
        if kind == "lowest bit":
            flip(q, 0)
        elif kind == "places in a tensor":
            p.data = p.data.flip(0)
        elif kind == "places of tensors":
            p.data, q.data = q.data, p.data
        elif kind == "state":
            flip(sampler.state[p]["momentum"], 31)
        elif kind == "lr":
            group["lr"] *= 2
        elif kind == "counters":
            group.update(step=group["step"] + 1, seed=5)

    found = {}
    for kind, altered in (
        ("nothing", last),
        ("lowest bit", last),
        ("lowest bit", 0),
        ("places in a tensor", last),
        ("places of tensors", last),
        ("state", last),
        ("lr", last),
        ("counters", last),
    ):
        params, sampler = two_vectors(2)
        if rank == altered:
            alter(kind, params, sampler)
        found[f"{kind} of {altered}"] = refusal(partial(sg.check_replicas, sampler))

    params, sampler = two_vectors(2)
    handle = sg.check_replicas_every(sampler, 3)
    if rank == last:
        flip(params[0], 5)
    found["hook"] = "|".join(refusal(sampler.step) for _ in range(4))
    handle.remove()
    found["removed"] = "|".join(refusal(sampler.step) for _ in range(4))
    return found


def wrong_groups(rank: int) -> dict[str, str]:
    """Errors of groups that do not fit."""

    def caught(call: Callable[[], object]) -> str:
        try:
            call()
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    theta = [nn.Parameter(torch.ones(3))]
    of_first = dist.new_group([0])
    own, other = RunningConvergence(2, 1), RunningConvergence(2 + rank, 1)
    own.update([0.0], chain=0)
    return {
        "not in it": caught(partial(sg.SGLD, theta, **COMMON, process_group=of_first)),
        "one chain twice": caught(own.gathered),
        "other sizes": caught(other.gathered),
    }


def raising(rank: int) -> str:
    """What becomes of the others when the last rank's closure raises."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = DDP(network(), process_group=group)
    sampler = sg.SGHMC(model.parameters(), **COMMON, seed=0, process_group=group)
    x, _ = data()

    def closure() -> torch.Tensor:
        sampler.zero_grad()
        loss = model(x).square().mean()
        if rank == dist.get_world_size() - 1 and sampler.param_groups[0]["step"] == 2:
            raise RuntimeError("the closure's own")
        loss.backward()
        return loss

    for _ in range(2):
        sampler.step(closure)
    found = refusal(partial(sampler.step, closure))
    return f"step {sampler.param_groups[0]['step']}: {found}"


def main(rank: int, size: int, folder: Path) -> dict[str, Any]:
    join(rank, size, folder)
    results: dict[str, Any] = {
        "one chain": {kind: one_chain(kind, rank, size) for kind in KINDS},
        "differences": differences(rank),
        "wrong groups": wrong_groups(rank),
    }
    for chains in (n for n in range(1, size + 1) if size % n == 0):
        results[f"{chains} chains"] = side_by_side(chains, folder)
    results["raising"] = raising(rank)
    return results


if __name__ == "__main__":
    run(main)
