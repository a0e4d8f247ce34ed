"""One rank of SBPS's, over gloo: ``python sbps_ranks.py RANK SIZE FOLDER``.

Does what test_distributed_sbps.py looks at, and saves it as FOLDER/RANK.pt.
"""

import copy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_rank import join, run
from torch import Tensor, nn
from torch.nn import functional as F
from two_ranks import chain, refusal

import torch_sgmcmc as sg

EVENTS = 300
NUM_DATA = 47
BATCH_SIZE = 11
TARGET: dict[str, Any] = {
    "num_data": NUM_DATA,
    "prior_precision": 1.0,
    "sample_interval": 0.1,
}
KINDS: dict[str, dict[str, Any]] = {
    "reverse mode": {},
    "forward mode": {"refresh_rate": 1.0},
    "preconditioned": {"preconditioned": True, "eps": 0.1},
    "forward mode, learning always": {
        **{"preconditioned": True, "eps": 0.1},
        "adapt_always": True,
    },
}


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_DATA, 3, generator=g, dtype=torch.float64)
    return x, (x[:, 0] + torch.linspace(-2, 2, NUM_DATA).double() > 0).double()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


class Losses:
    """A closure; of a rank's part of every minibatch, two examples but for the last."""

    def __init__(self, model: nn.Module, rank: int, size: int) -> None:
        self.model, (self.x, self.y) = model, data()
        self.part = slice(2 * rank, 2 * rank + 2 if rank < size - 1 else BATCH_SIZE)
        self.generator = torch.Generator().manual_seed(2)

    def __call__(self) -> Tensor:
        rows = torch.randperm(NUM_DATA, generator=self.generator)[:BATCH_SIZE]
        rows = rows[self.part]
        dtype = next(self.model.parameters()).dtype
        eta = self.model(self.x[rows].to(dtype)).squeeze(1)
        return F.binary_cross_entropy_with_logits(
            eta, self.y[rows].to(dtype), reduction="none"
        )


def make(kind: str, model: nn.Module, **settings: Any) -> sg.SBPS:
    of = model if kind.startswith("forward mode") else None
    settings = {"seed": 3, **TARGET, **KINDS[kind], **settings}
    return sg.SBPS(model.parameters(), **settings, model=of)


def advance(model: nn.Module, sampler: sg.SBPS, closure: Any, events: int) -> Any:
    """What the chain was after every event, and is."""
    times, places, samples = [], [], []
    average = sg.TimeAverage(sampler)
    handle = sampler.register_sample_hook(
        lambda _, time: samples.append(torch.tensor(time, dtype=torch.float64))
    )
    for _ in range(events):
        sampler.step(closure)
        times.append(sampler.trajectory_time)
        places.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    handle.remove()
    average.remove()
    return {
        **chain(model, sampler),
        "times": torch.tensor(times, dtype=torch.float64),
        "places": torch.stack(places),
        "samples": torch.stack(samples),
        "means": [average.mean(p) for p in model.parameters()],
    }


def one_chain(
    kind: str, rank: int, size: int, dtype: torch.dtype = torch.float64
) -> Any:
    model = network().to(dtype)
    sampler = make(kind, model)
    found = advance(model, sampler, Losses(model, rank, size), EVENTS)
    sg.check_replicas(sampler)
    return found


def gone_on_with(kind: str, rank: int, size: int) -> Any:
    """The same, with half the events made from a state dict."""
    model, parts, state = network(), [], None
    closure = Losses(model, rank, size)
    for half in range(2):
        sampler = make(kind, model, seed=3 + half)
        if state is not None:
            sampler.load_state_dict(state)
        part = advance(model, sampler, closure, EVENTS // 2)
        parts.append(part)
        state = sampler.state_dict()
    together = ("times", "places", "samples")
    return {**part, **{k: torch.cat([part[k] for part in parts]) for k in together}}


def alone(rank: int, group: Any = None) -> Any:
    """A chain of the rank's own."""
    model = network()
    sampler = make("forward mode", model, seed=rank, process_group=group)
    return advance(model, sampler, Losses(model, 0, 1), 50)


def outcome(model: nn.Module, sampler: sg.SBPS, closure: Any) -> dict[str, Any]:
    """What one more step says, and leaves."""
    before = [p.detach().clone() for p in model.parameters()]
    message = refusal(partial(sampler.step, closure))
    group = sampler.param_groups[0]
    return {
        "message": message,
        "stood still": all(map(torch.equal, before, model.parameters())),
        "step": group["step"],
        "num_skipped": group["num_skipped"],
    }


def bad_losses(rank: int, size: int) -> dict[str, Any]:
    """What all ranks do where losses or slopes are not finite on the last one."""
    found = {}
    for what, choice in (
        ("losses", "raise"),
        ("losses", "skip"),
        ("slopes", "raise"),
        ("number", "raise"),
    ):
        model = network()
        number = {"num_data": BATCH_SIZE - 1} if what == "number" else {}
        sampler = make("reverse mode", model, nonfinite=choice, **number)
        losses = Losses(model, rank, size)

        def closure(losses: Losses = losses, what: str = what) -> Tensor:
            terms = losses()
            if rank == size - 1 and what == "losses":
                return terms * torch.inf
            if rank == size - 1 and what == "slopes":
                return terms + (terms - terms.detach()).sqrt()  # slopes of infinity
            return terms

        found[f"{what} {choice}"] = outcome(model, sampler, closure)
        sg.check_replicas(sampler)
    return found


def unlike(rank: int, size: int) -> Any:
    """Ranks that do not sample one chain: the last one has something of its own."""
    found = {}
    for what in ("seeds", "steps", "parameters", "velocities", "settings", "models"):
        last = rank == size - 1
        model = network()
        seed = 4 if last and what == "seeds" else 3
        sampler = make("forward mode", model, seed=seed, prior_precision=0.0)
        losses = Losses(model, rank, size)
        if what != "seeds":
            group = sampler.param_groups[0]
            while group["line_time"] > 0 or group["step"] < 5:  # to a new line
                sampler.step(losses)
        if last and what == "parameters":
            with torch.no_grad():
                model[0].bias[0] += 1e-9
        elif what == "velocities":
            state = copy.deepcopy(sampler.state_dict())
            if last:
                state["state"][0]["velocity"][0, 0] += 1e-9
            sampler.load_state_dict(state)
        elif last and what == "settings":
            group["replacement"] = True
        elif last and what == "models":
            sampler.model = model
        elif last and what == "steps":
            sampler.param_groups[0]["step"] += 1
            sampler._note()
        step = sampler.param_groups[0]["step"]
        found[what] = outcome(model, sampler, losses)
        found[what]["step"] -= step
    return found


def raising(rank: int, size: int) -> Any:
    """What becomes of the others when the last rank's closure raises."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = network()
    sampler = make("reverse mode", model, process_group=group)
    losses, calls = Losses(model, rank, size), 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 8 and rank == size - 1:
            raise RuntimeError("the closure's own")
        return losses()

    for _ in range(7):
        sampler.step(closure)
    return outcome(model, sampler, closure)


def main(rank: int, size: int, folder: Path) -> dict[str, Any]:
    join(rank, size, folder)
    torch.manual_seed(20 + rank)
    results = {
        "seed": make("reverse mode", network(), seed=None).seed,
        **{kind: one_chain(kind, rank, size) for kind in KINDS},
        "bfloat16": one_chain("forward mode", rank, size, torch.bfloat16),
        "gone on": gone_on_with("forward mode", rank, size),
        "bad losses": bad_losses(rank, size),
        "unlike": unlike(rank, size),
    }
    groups = [dist.new_group([i]) for i in range(size)]
    results["alone"] = alone(rank, groups[rank])
    results["raising"] = raising(rank, size)
    return results


if __name__ == "__main__":
    run(main)
