"""HMC-ECS on several ranks: what deciding_ranks.py runs, and one process beside it."""

import copy
from functools import partial
from typing import Any

import torch
from ecs_data import Data, N, Regression
from ecs_data import make as make_ecs
from one_rank import Run, gone_on, outcome, raising
from one_rank import advance as advance_run
from torch import Tensor

import torch_sgmcmc as sg

STEPS = 40
# Parts of 4 and 3 data, or of 2, 2, 2 and 1.
KINDS: dict[str, dict[str, Any]] = {
    "perturbed": {"subsample_size": 7},
    "signed": {"variant": "signed", "subsample_size": 1, "num_products": 6},
    "first order": {"subsample_size": 7, "control_variate": 1},
    "rows": {"subsample_size": 7},
    "weighted": {"subsample_size": 7},
}
# Up to the rounding of sums over ranks, and what chains make of it.
ROUNDED = {"rtol": 1e-10, "atol": 1e-11}
COMPARED = ("draws", "seen")

#: What a chain was after every step, its losses among it, and is.
advance = partial(advance_run, look=torch.clone)


def make(kind: str, data: Data, **settings: Any) -> sg.HMCECS:
    settings = {"step_size": 1.1, "trajectory_length": 2.4, **KINDS[kind], **settings}
    sampler = make_ecs(data, **settings)
    if kind == "weighted":
        sampler.set_sampling_weights(torch.linspace(1.0, 3.0, N))
    return sampler


def begin(rank: int, size: int, kind: str = "perturbed", **settings: Any) -> Run:
    """All ranks' closures are alike: they are asked for other data."""
    data = Regression() if kind == "rows" else Data()
    closure = data.closure if isinstance(data, Regression) else data
    return Run(data, make(kind, data, **settings), closure)


def one_chain(kind: str, rank: int, size: int, seed: int | None = 3) -> Any:
    run = begin(rank, size, kind, seed=seed)
    found = advance(run, STEPS)
    sg.check_replicas(run.sampler)
    return found


def warmed_up() -> Any:
    run = begin(0, 1, "first order", step_size=0.5)
    plan = {"anchor_every": 8, "target_variance": 0.02, "progress": False}
    run.sampler.warmup(run.closure, 20, **plan)
    return advance(run, 10)


def calls() -> list[Tensor]:
    """What the closure is asked for in a step, in the order of the calls."""
    run = begin(0, 1, num_blocks=1)
    run.sampler.step(run.closure)
    run.model.seen.clear()
    run.sampler.step(run.closure)
    return [run.sampler.state["subsample"]["indices"], *run.model.seen]


def alone(rank: int, group: Any = None) -> Any:
    """A chain of the rank's own."""
    return advance(begin(0, 1, seed=rank, process_group=group), 10)


def not_finite(rank: int, size: int) -> dict[str, Any]:
    """What all ranks do where a value is not finite on the last one."""
    found = {}
    for choice in ("raise", "skip"):
        run = begin(rank, size, nonfinite=choice)
        run.sampler.step(run.closure)
        with torch.no_grad():
            run.model.bias += 0.01  # it looks afresh

        def infinite(indices: Tensor, run: Run = run) -> Tensor:
            return run.closure(indices) * (torch.inf if rank == size - 1 else 1)

        found[choice] = outcome(run, infinite)
    return found


def unlike(rank: int, size: int) -> dict[str, Any]:
    """Ranks that do not sample one chain: the last one has something of its own."""
    found = {}
    for what in ("seeds", "steps", "parameters", "settings", "subsamples", "weights"):
        last = rank == size - 1
        seed = 4 if last and what == "seeds" else 3
        kind = "weighted" if what == "weights" else "perturbed"
        run = begin(rank, size, kind, seed=seed)
        if what != "seeds":
            for _ in range(3):
                run.sampler.step(run.closure)
        group = run.sampler.param_groups[0]
        if what == "parameters":  # all ranks look afresh
            with torch.no_grad():
                run.model.weight[0] += 0.01 + 1e-9 * last
        elif what in ("subsamples", "weights"):
            state = copy.deepcopy(run.sampler.state_dict())
            if last and what == "weights":
                state["state"]["sampling"]["weights"][0] *= 1 + 1e-9
            elif last:
                state["state"]["subsample"]["indices"][0] ^= 1
            run.sampler.load_state_dict(state)
        elif last and what == "settings":
            group["max_variance"] *= 2
        elif last and what == "steps":
            group["step"] += 1
            run.sampler._note()
        found[what] = outcome(run)
    return found


def found(rank: int, size: int, group: Any) -> dict[str, Any]:
    return {
        **{kind: one_chain(kind, rank, size) for kind in KINDS},
        "warmed up": warmed_up(),
        "gone on": gone_on(
            begin(rank, size), partial(make, "perturbed", seed=9), advance, STEPS
        ),
        "calls": calls(),
        "not finite": not_finite(rank, size),
        "unlike": unlike(rank, size),
        "alone": alone(rank, group),
        "raising": raising(begin, rank, size, steps=3, at=3),
    }
