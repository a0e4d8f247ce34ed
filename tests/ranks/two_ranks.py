"""One rank of two, over gloo: ``python two_ranks.py RANK FOLDER``.

Does what test_distributed.py looks at, and saves it as FOLDER/RANK.pt.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_rank import join, run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_sgmcmc as sg

STEPS = 60
COMMON = {"lr": 0.05, "num_data": 40, "prior_precision": 1.0}
KINDS: dict[str, Callable[..., sg.Sampler]] = {
    "SGLD": partial(sg.SGLD, **COMMON),
    "SGHMC": partial(sg.SGHMC, **COMMON, resample_momentum_every=20),
    "SGHMC online": partial(sg.SGHMC, **COMMON, momentum=0.0, noise_estimate="online"),
    "SGNHT": partial(sg.SGNHT, **COMMON),
    "PSGLD": partial(sg.PSGLD, **COMMON, gamma=False, eps=0.1),
    "EWSG": partial(sg.EWSG, **COMMON, index_chain_length=2),
    "EWSG overdamped": partial(sg.EWSG, **COMMON, momentum=0.0),
}
# Whose closure is asked for minibatches by number.
PERSISTENT = {
    "EWSG persistent": partial(sg.EWSG, **COMMON, persistent_index_chain=True),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, sampler: sg.Sampler, rank: int, steps: int) -> None:
    """Steps with minibatches of the rank's own."""
    g = torch.Generator().manual_seed(100 + rank)

    def closure() -> torch.Tensor:
        if sampler.param_groups[0].get("persistent_index_chain", False):
            g.manual_seed(100 + rank + 2 * int(sampler.minibatches))
        x = torch.randn(4, 3, generator=g)
        sampler.zero_grad()
        loss = (model(x) - x[:, :2]).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        sampler.step(closure)


def chain(model: nn.Module, sampler: sg.Sampler) -> dict[str, Any]:
    state = sampler.state_dict()
    return {
        "params": [p.detach().clone() for p in model.parameters()],
        "state": state["state"],
        "groups": state["param_groups"],
    }


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(rank)
    results: dict[str, Any] = {}

    # Before there is a process group.
    late_model, early_model = network(), network()
    late = sg.SGHMC(late_model.parameters(), **COMMON)
    early = sg.SGLD(early_model.parameters(), **COMMON)
    results["drawn seeds"] = late.seed
    train(early_model, early, rank, 1)
    theta = nn.Parameter(torch.ones(3))
    sharded_late = network()
    before_sharding = sg.SGLD(sharded_late.parameters(), **COMMON, seed=1)

    join(rank, ranks, folder)
    for name, make in {**KINDS, **PERSISTENT}.items():
        torch.manual_seed(rank)
        model = DDP(network())
        sampler = make(model.parameters())
        train(model, sampler, rank, STEPS)
        results[name] = chain(model, sampler)

    model = DDP(late_model)
    train(model, late, rank, STEPS)
    results["late"] = chain(model, late)
    results["seeds given"] = sg.SGLD([theta], **COMMON, seed=rank).seed
    if rank == 0:  # a seed that is given takes no communication
        sg.SGLD([theta], **COMMON, seed=3)

    refusals = {"early": refusal(early.step)}
    refusals["PSGLD"] = refusal(partial(sg.PSGLD, [theta], **COMMON, seed=1))
    later = sg.PSGLD([theta], **COMMON, seed=1, gamma=False)
    theta.grad = torch.ones(3)
    later.step()
    later.param_groups[0]["gamma"] = True
    refusals["PSGLD step"] = refusal(later.step)
    theta.grad = None
    refusals["zero"] = refusal(
        lambda: ZeroRedundancyOptimizer(
            network().parameters(), optimizer_class=sg.SGLD, **COMMON, seed=0
        )
    )
    cpu = torch.device("cpu")
    for original in (False, True):
        model = FSDP(network(), use_orig_params=original, device_id=cpu)
        refusals[f"FSDP {original}"] = refusal(
            partial(sg.SGLD, model.parameters(), **COMMON, seed=0)
        )
    FSDP(sharded_late, use_orig_params=True, device_id=cpu)
    refusals["FSDP late"] = refusal(before_sharding.step)
    results["refusals"] = refusals

    return results


if __name__ == "__main__":
    run(main)
