"""Parts of a program that launch() runs on each rank.

``python PROGRAM RANK RANKS FOLDER``: what ``main(rank, ranks, folder)`` returns, having
called ``join``, is saved as FOLDER/RANK.pt.
"""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_sgmcmc as sg


def join(rank, ranks, folder):
    """Begins the group of all ranks: gloo, over the loopback."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )


def run(main):
    """Runs a rank, saves what it has found, and leaves with the others."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    found = main(rank, ranks, folder)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def refusal(call, kind=RuntimeError):
    """Returns the message of a call that raises."""
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was raised"


@dataclass
class Run:
    """A sampler of a model's parameters, and a closure of this rank's share."""

    model: Any
    sampler: sg.Sampler
    closure: Callable[..., Tensor]

    @property
    def params(self):
        groups = self.sampler.param_groups
        return [p for group in groups for p in group["params"]]


def theta(params):
    return torch.cat([p.detach().reshape(-1) for p in params])


def state_of(run):
    state = run.sampler.state_dict()
    return {
        "params": [p.detach().clone() for p in run.params],
        "state": state["state"],
        "groups": state["param_groups"],
    }


def advance(run, steps, look=None):
    """Returns the chain after every step, and its checkpoint."""
    draws, seen = [], []
    for _ in range(steps):
        loss = run.sampler.step(run.closure)
        draws.append(theta(run.params))
        if look is not None:
            seen.append(look(loss))
    found = {**state_of(run), "draws": torch.stack(draws)}
    return {**found, "seen": torch.stack(seen)} if seen else found


def gone_on(run, make, advance, steps):
    """Half the steps, and the rest from a state dict by a sampler that is made anew."""
    first = advance(run, steps // 2)
    saved = run.sampler.state_dict()
    run.sampler = make(run.model)
    run.sampler.load_state_dict(saved)
    rest = advance(run, steps // 2)
    lists = [key for key in ("draws", "seen", "samples") if key in rest]
    return {**rest, **{key: torch.cat([first[key], rest[key]]) for key in lists}}
