"""Samplers, and other methods that predict with networks, at a budget of gradients.

A gradient is one of all data, and a budget is for each chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from gold import CHAINS, Hamiltonian
from tasks import Params, Task
from torch import Tensor
from torch.func import stack_module_state
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torch_sgmcmc as sg

BURN_IN = 0.5
DRAWS = 200  # of each chain
STABLE = 0.25  # of the largest stable lr
PILOT = 100  # gradients before lr is set
MEMBERS, DROPOUT, RANK = 5, 0.1, 20  # of ensembles, MC dropout and SWAG
SBPS_CHAINS = 4  # one after the other
DATA = ("minibatches", "all data")


@dataclass
class Result:
    """Predictions of draws, with temperatures and settings."""

    draws: list[Tensor] = field(default_factory=list)  # [chains, rows, outputs]
    #: [chains] for each draw, by gradients of all data.
    temperatures: list[Tensor] = field(default_factory=list)
    kinetic: float = math.nan
    settings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """A task, a minibatch (0: all data), a budget and a seed, for a method."""

    task: Task
    batch: int
    budget: int
    seed: int

    def rows(self, size: int, chains: int = CHAINS) -> Callable[[], Tensor | None]:
        """Returns a function that draws a minibatch for each chain."""
        if not self.batch:
            return lambda: None
        sampler = sg.IndependentBatchSampler(len(self.task.y), size, seed=self.seed)
        return lambda: sampler.draw(chains)

    def pace(self, evaluations: int = 1) -> tuple[int, int]:
        """Returns the size of a step's minibatches, and the number of steps."""
        size, count = self.batch // evaluations, len(self.task.y)
        cost = evaluations * size / count if self.batch else evaluations
        return size, round(self.budget / cost)


# ---- Step sizes ----------------------------------------------------------------------


class Pilot:
    """A short run, at whose end ``check_setup`` finds the limits of lr."""

    def __init__(self, task: Task, batch: int) -> None:
        torch.manual_seed(1)
        self.task, self.model, count = task, task.network(), len(task.y)
        batches = sg.IndependentBatchSampler(count, batch or count, seed=1)
        y = task.y if task.classes else task.y[:, None]
        self.loader = DataLoader(TensorDataset(task.x.T, y), batch_sampler=batches)
        losses = sg.losses
        self.loss = (
            losses.categorical() if task.classes else losses.gaussian(task.noise)
        )
        sampler = self.sampler(sg.BAOA, seed=1)
        sampler.draw_from_prior()
        lr = self.limit(sg.BAOA)
        for group in sampler.param_groups:
            group["lr"] = lr
        squares: list[Tensor] = []
        for _ in range(PILOT):
            for minibatch in self.loader:
                sampler.zero_grad()
                self.loss(self.model, minibatch).backward()
                sampler.step()
                squares.append(self.squared_gradient())
        #: Mean squared gradients, by element.
        self.square = torch.stack(squares[len(squares) // 2 :]).mean(0)

    def squared_gradient(self) -> Tensor:
        """Returns the squares of all elements of the gradient."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return torch.cat([grad.flatten() for grad in grads]).square()

    def sampler(self, make: Callable[..., Any], **given: Any) -> Any:
        """Returns a sampler of the network."""
        groups = self.task.groups(self.model.named_parameters())
        return make(groups, lr=1e-9, num_data=len(self.task.y), **given)

    def report(self, make: Callable[..., Any]) -> sg.SetupReport:
        """Returns what ``check_setup`` finds for a sampler."""
        sampler = self.sampler(make)
        return sg.check_setup(self.model, self.loss, self.loader, sampler)

    def limit(self, make: Callable[..., Any]) -> float:
        """Returns an lr that keeps both limits.

        For pSGLD, which has none, minibatches add as much heat as to SGLD.
        """
        if make is sg.PSGLD:
            ratio = self.square.mean() / self.square.sqrt().mean()
            return self.limit(sg.SGLD) * float(ratio)
        found = self.report(make)
        limits = STABLE * found.largest_lr, found.noise_lr
        return min(limit for limit in limits if not math.isnan(limit))


pilot = cache(Pilot)

# ---- Samplers ------------------------------------------------------------------------


class Kept:
    """The draws of the second half of a run."""

    def __init__(self, task: Task, budget: float) -> None:
        self.task, self.first = task, BURN_IN * budget
        self.every = (budget - self.first) / DRAWS
        self.result = Result()

    def look(self, spent: float, params: Params) -> None:
        """Keeps a draw when its time has come."""
        due = self.first + (len(self.result.draws) + 1) * self.every
        if spent >= due - 1e-6:
            self.add(params)

    def add(self, params: Params) -> None:
        """Keeps a draw."""
        self.result.draws.append(self.task.predictions(params))
        self.result.temperatures.append(self.task.temperatures(params))


def run_gradients(
    make: Callable[..., Any],
    cell: Cell,
    *,
    evaluations: int = 1,
    tuned: bool = False,
    part: float = 1.0,
    **given: Any,
) -> Result:
    """Runs a sampler that takes gradients, or a closure for several of them."""
    task = cell.task
    params = task.prior_draws(CHAINS, cell.seed)
    size, steps = cell.pace(evaluations)
    draw, kept, start = cell.rows(size), Kept(task, steps), round(BURN_IN * steps)
    if tuned:
        given["tune_steps"] = start
    if not cell.batch and make is not sg.SGLD:
        given["momentum"] = 0.99
    if make in (sg.EWSG, sg.MCLMC):
        given["num_chains"] = CHAINS
    limits = pilot(task, cell.batch)
    lr = limits.limit(sg.SGHMC if make is sg.EWSG else sg.BAOA if tuned else make)
    lr *= part / evaluations  # smaller minibatches have more noise
    given |= {"lr": lr, "num_data": len(task.y), "seed": cell.seed}
    sampler = make(task.groups(params.items()), **given)
    monitor = sg.TemperatureMonitor(sampler, every=11)

    def closure() -> Tensor:
        sampler.zero_grad()
        return task.losses(params, draw()).sum()

    for step in tqdm(range(1, steps + 1), leave=False):
        if step == start + 1:
            monitor.reset()
            if make is sg.PSGLD:
                for group in sampler.param_groups:
                    group["adapt"] = False
        if evaluations > 1:
            sampler.step(closure)
        else:
            closure()
            sampler.step()
        kept.look(step, params)
    group, found = sampler.param_groups[0], kept.result
    found.kinetic = float(monitor.all().kinetic.mean)
    found.settings = {k: float(group[k]) for k in ("lr", "momentum") if k in group}
    return found


def run_hmc(cell: Cell) -> Result:
    """Runs HMC; a quarter of the budget adapts its step size."""
    settings = {"step_size": 0.01, "num_steps": 50}
    chains = Hamiltonian(cell.task, cell.seed, **settings)
    sampler, finished = chains.sampler, False
    while not finished:
        finished = chains.gradients + 2 * 51 > cell.budget / 4
        sampler.warmup(chains.closure, 1, finish=finished, progress=False)
    kept = Kept(cell.task, cell.budget)
    with tqdm(total=cell.budget, leave=False) as progress:
        while chains.gradients < cell.budget:
            sampler.step(chains.closure)
            progress.update(chains.gradients - progress.n)
            kept.look(chains.gradients, chains.params)
    found = kept.result
    found.settings = {"step_size": float(sampler.param_groups[0]["step_size"])}
    return found


def run_sbps(cell: Cell, *, preconditioned: bool) -> Result:
    """Runs chains of SBPS, one after the other."""
    starts, found = cell.task.prior_draws(SBPS_CHAINS, cell.seed), []
    for chain in range(SBPS_CHAINS):
        params = {
            name: p.detach()[chain : chain + 1].clone().requires_grad_()
            for name, p in starts.items()
        }
        own = replace(cell, seed=sg.fold_in(cell.seed, chain))
        found.append(_one_sbps(own, params, preconditioned))
    # Samples are at equal times, of which no two chains have as many.
    count = min(len(result.draws) for result in found)

    def joined(series: list[list[Tensor]]) -> list[Tensor]:
        return [torch.cat([each[i] for each in series]) for i in range(count)]

    draws = joined([result.draws for result in found])
    return Result(draws, joined([result.temperatures for result in found]))


def _one_sbps(cell: Cell, params: Params, preconditioned: bool) -> Result:
    task, total = cell.task, cell.budget * len(cell.task.y)
    draw, kept = cell.rows(cell.batch, 1), Kept(task, cell.budget)
    sampler = sg.SBPS(
        task.groups(params.items()),
        preconditioned=preconditioned,
        num_data=len(task.y),
        seed=cell.seed,
    )

    def closure() -> Tensor:
        (x, y), *_ = task.blocks(draw())
        return task.each(params, x, y)[0]

    with tqdm(total=total, leave=False) as progress:
        sampled = False
        while (spent := sum(sampler.evaluations)) < total:
            if spent >= BURN_IN * total and not sampled:
                sampled = True
                interval = sampler.param_groups[0]["trajectory_time"] / DRAWS
                for group in sampler.param_groups:
                    group |= {"adapt": False, "sample_interval": interval}
                sampler.register_sample_hook(lambda *_: kept.add(params))
            sampler.step(closure)
            progress.update(spent - progress.n)
    return kept.result


# ---- Other methods -------------------------------------------------------------------


def networks(
    cell: Cell, count: int, steps: int, *, dropout: float = 0.0, floor: float = 0.0
) -> Iterator[Params]:
    """Yields networks after each step of SGD towards the posterior's mode.

    From a quarter of the largest stable lr, a cosine falls to ``floor`` of that.
    """
    task, draw = cell.task, cell.rows(cell.pace()[0], count)
    torch.manual_seed(cell.seed)
    params, _ = stack_module_state([task.network() for _ in range(count)])
    groups = [
        {"params": [p], "weight_decay": task.precisions[name] / len(task.y)}
        for name, p in params.items()
    ]
    lr = STABLE * pilot(task, cell.batch).report(sg.SGHMC).largest_lr
    optimizer = torch.optim.SGD(groups, lr, momentum=0.9)

    def factor(step: int) -> float:
        cosine = (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
        return floor + (1 - floor) * cosine

    schedule = LambdaLR(optimizer, factor)
    while True:
        optimizer.zero_grad()
        task.losses(params, draw(), dropout)
        optimizer.step()
        schedule.step()
        yield params


def last(steps: int, found: Iterator[Params], name: str) -> Params:
    """Returns the networks after so many steps."""
    for _ in tqdm(range(steps - 1), name, leave=False):
        next(found)
    return next(found)


def run_sgd(cell: Cell) -> Result:
    """One network."""
    _, steps = cell.pace()
    params = last(steps, networks(cell, CHAINS, steps), "SGD")
    return Result([cell.task.predictions(params)])


def run_ensemble(cell: Cell) -> Result:
    """Five networks, each of a fifth of the budget."""
    steps = cell.pace()[1] // MEMBERS
    params = last(steps, networks(cell, MEMBERS * CHAINS, steps), "ensemble")
    p = cell.task.predictions(params)
    return Result([*p.unflatten(0, (MEMBERS, CHAINS))])


def run_dropout(cell: Cell) -> Result:
    """MC dropout."""
    task, (_, steps) = cell.task, cell.pace()
    found = networks(cell, CHAINS, steps, dropout=DROPOUT)
    params = last(steps, found, "MC dropout")
    return Result([task.predictions(params, DROPOUT) for _ in range(DRAWS)])


def run_swag(cell: Cell) -> Result:
    """SWAG: a Gaussian of the second half of a run, with deviations of low rank."""
    steps = cell.pace()[1]
    half = steps // 2
    found = networks(cell, CHAINS, half, floor=0.5)
    params = last(half, found, "SWAG")
    every, points = max(1, half // (2 * RANK)), []
    for step in range(1, half + 1):
        params = next(found)
        if step % every == 0:
            points.append({k: p.detach().clone() for k, p in params.items()})
    stacked = {k: torch.stack([point[k] for point in points]) for k in params}
    mean = {k: p.mean(0) for k, p in stacked.items()}
    sd = {k: p.std(0, correction=0) for k, p in stacked.items()}
    draws = []
    for _ in range(DRAWS):
        weights = torch.randn(RANK, CHAINS) / (2 * (RANK - 1)) ** 0.5
        draw = {
            k: mean[k]
            + torch.randn_like(sd[k]) * sd[k] / 2**0.5
            + torch.einsum("rk,rk...->k...", weights, p[-RANK:] - mean[k])
            for k, p in stacked.items()
        }
        draws.append(cell.task.predictions(draw))
    return Result(draws)


# ---- Table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A method, and whether it takes minibatches, all data, or both."""

    run: Callable[[Cell], Result]
    data: tuple[str, ...] = DATA
    least: int = 0  # the smallest budget


def by_gradients(kind: type, *data: str, **given: Any) -> Method:
    """Returns the method of a sampler."""
    run, least = partial(run_gradients, kind, **given), 80 * given.get("tuned", False)
    return Method(run, data or DATA, least)


METHODS = {
    "SGLD": by_gradients(sg.SGLD),
    "SGLRW": by_gradients(sg.SGLRW, "minibatches"),
    "pSGLD, frozen": by_gradients(sg.PSGLD, "minibatches", gamma=False),
    "SGHMC": by_gradients(sg.SGHMC),
    "SGHMC, lr / 10": by_gradients(sg.SGHMC, "minibatches", part=0.1),
    "BAOA": by_gradients(sg.BAOA),
    "SGNHT": by_gradients(sg.SGNHT, "minibatches"),
    "EWSG": by_gradients(sg.EWSG, "minibatches", evaluations=2),
    "MCLMC": by_gradients(sg.MCLMC, "minibatches"),
    "MCLMC, tuned": by_gradients(sg.MCLMC, "all data", tuned=True),
    "MCLMC, energy_variance=0.3": by_gradients(
        sg.MCLMC, "all data", tuned=True, energy_variance=0.3
    ),
    "HMC": Method(run_hmc, ("all data",), least=1000),
    "SBPS": Method(partial(run_sbps, preconditioned=False), ("minibatches",)),
    "pSBPS": Method(partial(run_sbps, preconditioned=True), ("minibatches",)),
    "SGD": Method(run_sgd, ("minibatches",)),
    "deep ensemble of five": Method(run_ensemble, ("minibatches",)),
    "SWAG": Method(run_swag, ("minibatches",)),
    "MC dropout": Method(run_dropout, ("minibatches",)),
}
