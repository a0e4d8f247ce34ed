"""SBPS on several ranks: what deciding_ranks.py runs, and one process beside it."""

import copy
from functools import partial
from typing import Any

import torch
from one_rank import Run, gone_on, outcome, raising
from one_rank import advance as advance_run
from torch import Tensor, nn
from torch.nn import functional as F

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
# Up to the rounding of the sums over ranks, and what events make of it.
ROUNDED = {"rtol": 1e-11, "atol": 1e-12}
COMPARED = ("draws", "seen", "samples", "means")


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_DATA, 3, generator=g, dtype=torch.float64)
    return x, (x[:, 0] + torch.linspace(-2, 2, NUM_DATA).double() > 0).double()


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


def begin(
    rank: int,
    size: int,
    kind: str = "reverse mode",
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Run:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)
    model = nn.Sequential(*layers).to(dtype)
    return Run(model, make(kind, model, **settings), Losses(model, rank, size))


def advance(run: Run, events: int) -> Any:
    """What the chain was after every event, its time among it, and is."""
    sampler: Any = run.sampler
    samples = []
    average = sg.TimeAverage(sampler)
    handle = sampler.register_sample_hook(
        lambda _, time: samples.append(torch.tensor(time, dtype=torch.float64))
    )
    found = advance_run(run, events, lambda _: torch.tensor(sampler.trajectory_time))
    handle.remove()
    average.remove()
    means = [average.mean(p) for p in run.params]
    return {**found, "samples": torch.stack(samples), "means": means}


def one_chain(
    kind: str, rank: int, size: int, seed: int = 3, dtype: torch.dtype = torch.float64
) -> Any:
    run = begin(rank, size, kind, dtype, seed=seed)
    found = advance(run, EVENTS)
    sg.check_replicas(run.sampler)
    return found


def alone(rank: int, group: Any = None) -> Any:
    """A chain of the rank's own."""
    return advance(begin(0, 1, "forward mode", seed=rank, process_group=group), 50)


def not_finite(rank: int, size: int) -> dict[str, Any]:
    """What all ranks do where losses, slopes or numbers on the last one are bad."""
    found = {}
    for what, choice in (
        ("losses", "raise"),
        ("losses", "skip"),
        ("slopes", "raise"),
        ("number", "raise"),
    ):
        number = {"num_data": BATCH_SIZE - 1} if what == "number" else {}
        run = begin(rank, size, nonfinite=choice, **number)

        def closure(losses: Any = run.closure, what: str = what) -> Tensor:
            terms = losses()
            if rank == size - 1 and what == "losses":
                return terms * torch.inf
            if rank == size - 1 and what == "slopes":
                return terms + (terms - terms.detach()).sqrt()  # slopes of infinity
            return terms

        found[f"{what} {choice}"] = outcome(run, closure)
        sg.check_replicas(run.sampler)
    return found


def unlike(rank: int, size: int) -> dict[str, Any]:
    """Ranks that do not sample one chain: the last one has something of its own."""
    found = {}
    for what in ("seeds", "steps", "parameters", "velocities", "settings", "models"):
        last = rank == size - 1
        seed = 4 if last and what == "seeds" else 3
        run = begin(rank, size, "forward mode", seed=seed, prior_precision=0.0)
        sampler: Any = run.sampler
        group = sampler.param_groups[0]
        if what != "seeds":
            while group["line_time"] > 0 or group["step"] < 5:  # to a new line
                sampler.step(run.closure)
        if last and what == "parameters":
            with torch.no_grad():
                run.model[0].bias[0] += 1e-9
        elif what == "velocities":
            state = copy.deepcopy(sampler.state_dict())
            if last:
                state["state"][0]["velocity"][0, 0] += 1e-9
            sampler.load_state_dict(state)
        elif last and what == "settings":
            group["replacement"] = True
        elif last and what == "models":
            sampler.model = run.model
        elif last and what == "steps":
            group["step"] += 1
            sampler._note()
        found[what] = outcome(run)
    return found


def found(rank: int, size: int, group: Any) -> dict[str, Any]:
    again = partial(make, "forward mode", seed=4)
    return {
        **{kind: one_chain(kind, rank, size) for kind in KINDS},
        "bfloat16": one_chain("forward mode", rank, size, dtype=torch.bfloat16),
        "gone on": gone_on(begin(rank, size, "forward mode"), again, advance, EVENTS),
        "not finite": not_finite(rank, size),
        "unlike": unlike(rank, size),
        "alone": alone(rank, group),
        "raising": raising(begin, rank, size, steps=7, at=1),
    }
