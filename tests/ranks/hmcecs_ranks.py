"""One rank of HMC-ECS's, over gloo: ``python hmcecs_ranks.py RANK SIZE FOLDER``.

Does what test_distributed_hmcecs.py looks at, and saves it as FOLDER/RANK.pt.
"""

import copy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ecs_data import Data, N, Regression, make
from one_rank import join, run
from torch import Tensor
from two_ranks import refusal

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


def problem(kind: str, **settings: Any) -> tuple[Data, Any, sg.HMCECS]:
    data = Regression() if kind == "rows" else Data()
    closure = data.closure if isinstance(data, Regression) else data
    settings = {"step_size": 1.1, "trajectory_length": 2.4, **KINDS[kind], **settings}
    sampler = make(data, **settings)
    if kind == "weighted":
        sampler.set_sampling_weights(torch.linspace(1.0, 3.0, N))
    return data, closure, sampler


def theta(data: Data) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in data.params])


def advance(data: Data, closure: Any, sampler: sg.HMCECS, steps: int) -> Any:
    """What the chain was after every step, and is."""
    losses, draws = [], []
    for _ in range(steps):
        losses.append(sampler.step(closure))
        draws.append(theta(data))
    return {
        "losses": torch.stack(losses),
        "draws": torch.stack(draws),
        "group": {k: v for k, v in sampler.param_groups[0].items() if k != "params"},
        "state": copy.deepcopy(sampler.state_dict()["state"]),
    }


def one_chain(kind: str, seed: int | None = 3) -> Any:
    data, closure, sampler = problem(kind, seed=seed)
    found = advance(data, closure, sampler, STEPS)
    sg.check_replicas(sampler)
    return found


def warmed_up() -> Any:
    data, closure, sampler = problem("first order", step_size=0.5)
    plan = {"anchor_every": 8, "target_variance": 0.02, "progress": False}
    sampler.warmup(closure, 20, **plan)
    return advance(data, closure, sampler, 20)


def gone_on_with(kind: str) -> Any:
    """The same, with half the steps made from a state dict."""
    parts, state = [], None
    data, closure, sampler = problem(kind)
    for _ in range(2):
        if state is not None:
            sampler = make(data, **{**KINDS[kind], "seed": 9})
            sampler.load_state_dict(state)
        parts.append(advance(data, closure, sampler, STEPS // 2))
        state = copy.deepcopy(sampler.state_dict())
    draws = torch.cat([part["draws"] for part in parts])
    return {**parts[1], "draws": draws}


def calls(rank: int) -> list[Tensor]:
    """What the closure is asked for in a step, in the order of the calls."""
    data, closure, sampler = problem("perturbed", num_blocks=1)
    sampler.step(closure)
    data.seen.clear()
    sampler.step(closure)
    subsample = sampler.state["subsample"]["indices"]
    return [subsample, *data.seen]


def alone(rank: int, group: Any = None) -> Any:
    """A chain of the rank's own."""
    data, closure, sampler = problem("perturbed", seed=rank, process_group=group)
    return advance(data, closure, sampler, 10)


def outcome(data: Data, closure: Any, sampler: sg.HMCECS) -> dict[str, Any]:
    """What one more step says, and leaves."""
    group, before = sampler.param_groups[0], theta(data)
    step, skipped = group["step"], group["num_skipped"]
    return {
        "message": refusal(partial(sampler.step, closure)),
        "stood still": torch.equal(before, theta(data)),
        "steps": group["step"] - step,
        "skipped": group["num_skipped"] - skipped,
    }


def not_finite(rank: int, size: int) -> dict[str, Any]:
    """What all ranks do where a value is not finite on the last one."""
    found = {}
    for choice in ("raise", "skip"):
        data, closure, sampler = problem("perturbed", nonfinite=choice)
        sampler.step(closure)
        with torch.no_grad():
            data.bias += 0.01  # it looks afresh

        def infinite(indices: Tensor, data: Data = data) -> Tensor:
            return data(indices) * (torch.inf if rank == size - 1 else 1)

        found[choice] = outcome(data, infinite, sampler)
    return found


def unlike(rank: int, size: int) -> Any:
    """Ranks that do not sample one chain: the last one has something of its own."""
    found = {}
    for what in ("seeds", "steps", "parameters", "settings", "subsamples", "weights"):
        last = rank == size - 1
        seed = 4 if last and what == "seeds" else 3
        kind = "weighted" if what == "weights" else "perturbed"
        data, closure, sampler = problem(kind, seed=seed)
        if what != "seeds":
            for _ in range(3):
                sampler.step(closure)
        group = sampler.param_groups[0]
        if what == "parameters":  # all ranks look afresh
            with torch.no_grad():
                data.weight[0] += 0.01 + 1e-9 * last
        elif what in ("subsamples", "weights"):
            state = copy.deepcopy(sampler.state_dict())
            if last and what == "weights":
                state["state"]["sampling"]["weights"][0] *= 1 + 1e-9
            elif last:
                state["state"]["subsample"]["indices"][0] ^= 1
            sampler.load_state_dict(state)
        elif last and what == "settings":
            group["max_variance"] *= 2
        elif last and what == "steps":
            group["step"] += 1
            sampler._note()
        found[what] = outcome(data, closure, sampler)
    return found


def raising(rank: int, size: int) -> Any:
    """What becomes of the others when the last rank's closure raises."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    data, closure, sampler = problem("perturbed", process_group=group)
    for _ in range(3):
        sampler.step(closure)
    count = 0

    def raises(indices: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count == 3 and rank == size - 1:
            raise RuntimeError("the closure's own")
        return data(indices)

    return outcome(data, raises, sampler)


def main(rank: int, size: int, folder: Path) -> dict[str, Any]:
    join(rank, size, folder)
    torch.manual_seed(20 + rank)
    results = {
        "seed": problem("perturbed", seed=None)[2].seed,
        **{kind: one_chain(kind) for kind in KINDS},
        "warmed up": warmed_up(),
        "gone on": gone_on_with("perturbed"),
        "calls": calls(rank),
        "not finite": not_finite(rank, size),
        "unlike": unlike(rank, size),
    }
    groups = [dist.new_group([i]) for i in range(size)]
    results["alone"] = alone(rank, groups[rank])
    results["raising"] = raising(rank, size)
    return results


if __name__ == "__main__":
    run(main)
