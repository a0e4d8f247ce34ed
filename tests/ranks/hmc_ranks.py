"""HMC on several ranks: what deciding_ranks.py runs, and one process beside it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from one_rank import Run, advance, gone_on, outcome, raising
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_sgmcmc as sg

STEPS = 50
NUM_DATA = 47  # which ranks cannot share evenly
CHAINS = 3
TARGET: dict[str, Any] = {"num_data": NUM_DATA, "prior_precision": 1.0}
COARSE: dict[str, Any] = {**TARGET, "step_size": 0.45, "num_steps": 3}
KINDS: dict[str, Callable[..., sg.HMC]] = {
    "drawn": partial(sg.HMC, **COARSE),
    "kept": partial(sg.HMC, **COARSE, resample_momentum_every=4),
    "untested": partial(sg.HMC, **COARSE, metropolis=False),
}
# Up to the rounding of the mean over ranks, and what chains make of it.
ROUNDED = {"rtol": 1e-9, "atol": 1e-11}
COMPARED = ("draws",)


def data(rank: int, size: int) -> tuple[Tensor, Tensor, float]:
    """A rank's share, unlike the others', and the weight of its mean loss."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_DATA, 3, generator=g, dtype=torch.float64)
    y = (x[:, 0] + torch.linspace(-2, 2, NUM_DATA).double() > 0).double()
    x, y = x.chunk(size)[rank], y.chunk(size)[rank]
    return x, y, size * len(x) / NUM_DATA


def network(size: int, group: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    return DDP(model, process_group=group, **options) if size > 1 else model


class Loss:
    """A closure; of a rank's share of the data."""

    def __init__(self, model: nn.Module, rank: int, size: int) -> None:
        self.model, (self.x, self.y, self.weight) = model, data(rank, size)

    def __call__(self) -> Tensor:
        eta = self.model(self.x).squeeze(1)
        loss = self.weight * F.binary_cross_entropy_with_logits(eta, self.y)
        loss.backward()
        return loss


class LossOfChains:
    """The same of several chains, whose gradients are averaged by hand."""

    def __init__(self, theta: Tensor, rank: int, size: int) -> None:
        self.theta, self.size = theta, size
        self.x, self.y, self.weight = data(rank, size)

    def __call__(self) -> Tensor:
        eta = self.theta @ self.x.T
        terms = F.binary_cross_entropy_with_logits(
            eta, self.y.expand_as(eta), reduction="none"
        )
        losses = self.weight * terms.mean(1)
        losses.sum().backward()
        if self.size > 1:
            dist.all_reduce(self.theta.grad)
            self.theta.grad /= self.size
        return losses.detach()


def make(kind: str, model: nn.Module, **settings: Any) -> sg.HMC:
    return KINDS[kind](model.parameters(), **settings)


def begin(
    rank: int, size: int, kind: str = "kept", seed: int | None = 3, **settings: Any
) -> Run:
    # Buckets' memory may be the gradients': none is kept.
    options = {"gradient_as_bucket_view": kind == "kept"} if size > 1 else {}
    model = network(size, settings.get("process_group"), **options)
    torch.manual_seed(10 + rank)
    sampler = make(kind, model, seed=seed, **settings)
    return Run(model, sampler, Loss(model, rank, size))


def one_chain(kind: str, rank: int, size: int, seed: int | None = None) -> Any:
    run = begin(rank, size, kind, seed)
    found = advance(run, STEPS)
    sg.check_replicas(run.sampler)
    return found


def many_chains(rank: int, size: int) -> Any:
    model = nn.ParameterList([torch.ones(CHAINS, 3, dtype=torch.float64)])
    sampler = sg.HMC(model.parameters(), **COARSE, num_chains=CHAINS, seed=2)
    found = advance(Run(model, sampler, LossOfChains(model[0], rank, size)), STEPS)
    sg.check_replicas(sampler)
    return found


def warmed_up(rank: int, size: int, model: nn.Module, sampler: sg.HMC) -> Any:
    run = Run(model, sampler, Loss(model, rank, size))
    sampler.warmup(run.closure, 20, progress=False)
    return sampler.param_groups[0]["step_size"], advance(run, 10)


def all_data_on_each(size: int) -> Any:
    model = network(size).float()
    whole = Loss(model, 0, 1)
    whole.x, whole.y = whole.x.float(), whole.y.float()
    return advance(Run(model, make("kept", model, seed=4), whole), STEPS)


def alone(rank: int, group: Any = None) -> Any:
    """A chain of the rank's own."""
    model = network(1)
    sampler = make("kept", model, seed=rank, process_group=group)
    return advance(Run(model, sampler, Loss(model, 0, 1)), STEPS)


def not_finite(rank: int, size: int) -> dict[str, Any]:
    """What all ranks do where something is not finite on the last one."""
    found = {}
    for where, call, choice in (
        ("end", 4, "raise"),
        ("start", 1, "raise"),
        ("start skipped", 1, "skip"),
        ("gradient", 1, "raise"),
        ("gradient at the end", 4, "raise"),
    ):
        run = begin(rank, size, nonfinite=choice)
        loss, calls = run.closure, 0

        def closure(loss: Any = loss, where: str = where, call: int = call) -> Tensor:
            nonlocal calls
            calls += 1
            here = calls == call and rank == size - 1
            x = loss.x
            by_gradient = where.startswith("gradient")
            if here and by_gradient:
                loss.x = x * torch.inf
            value = loss()
            loss.x = x
            return value * torch.inf if here and not by_gradient else value

        found[where] = outcome(run, closure)
        sg.check_replicas(run.sampler)
    return found


def unlike(rank: int, size: int) -> dict[str, Any]:
    """Ranks that do not sample one chain."""
    found = {}
    for what in ("seeds", "gradients"):
        run = begin(rank, size, seed=rank if what == "seeds" else 0)
        if what == "gradients":
            run.closure.model = run.closure.model.module
        found[what] = outcome(run)
    return found


def late_sampler(rank: int) -> Run:
    """One that begins before there is a process group."""
    torch.manual_seed(20 + rank)
    model = network(1)
    torch.manual_seed(20 + rank)
    return Run(model, make("drawn", model), Loss(model, 0, 1))


def found(rank: int, size: int, group: Any, late: Run) -> dict[str, Any]:
    results = {
        "drawn seed": late.sampler.seed,
        "warm-up": warmed_up(rank, size, DDP(late.model), late.sampler),
        "late seed": late.sampler.seed,
        **{kind: one_chain(kind, rank, size) for kind in KINDS},
        "chains": many_chains(rank, size),
        "all data": all_data_on_each(size),
        "not finite": not_finite(rank, size),
        "unlike": unlike(rank, size),
        "alone": alone(rank, group),
        "raising": raising(begin, rank, size, steps=1, at=4),
    }
    seed = results["kept"]["groups"][0]["seed"]
    again = partial(make, "kept", seed=seed + 1)
    run = begin(rank, size, seed=seed)
    results["gone on"] = gone_on(run, again, advance, STEPS)
    return results
