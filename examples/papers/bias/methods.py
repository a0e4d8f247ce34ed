"""Every sampler, in terms of the step that θ makes in SGLD.

With ``e`` the lr of SGLD, momentum 1 − α and lr = α e make a sampler as fast, and the
minibatches heat it as much. pSGLD's lr is such that they heat it as much, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torch_sgmcmc as sg

from .problems import Problem

ALPHA = 0.1
# Settles in (A + β̂) / κ = some 1000 steps; κ's root, the friction's spread, is 0.01.
THERMOSTAT_RATE = 1e-4
NUM_STEPS = 8  # of HMC's trajectories


@dataclass
class Chain:
    """A sampler that runs, and one step of it.

    Args:
        sampler: with all chains, or with one.
        step: makes a step.
        cost: a step's gradients of single data, for each chain; None: see spent.
        spent: those of all steps, where they differ.
    """

    sampler: sg.Sampler
    step: Callable[[], Any]
    cost: int | None = None
    spent: Callable[[], int] | None = None


@dataclass(frozen=True)
class Cell:
    """The model, data and sizes that a sampler is built for.

    Args:
        problem: what it samples.
        model: its chains, at their start.
        step: a multiple of what heats as much in every sampler, or the sampler's own.
        size: of a minibatch.
        seed: of noise and minibatches.
    """

    problem: Problem
    model: nn.Module
    step: float
    size: int
    seed: int

    @property
    def chains(self) -> int:
        """Their number, K."""
        return len(next(self.model.parameters()))

    @property
    def common(self) -> dict[str, Any]:
        """The settings of all samplers."""
        num_data = len(self.problem.y)
        return {"num_data": num_data, "prior_precision": 1.0, "seed": self.seed}

    def minibatches(self, size: int) -> Callable[[], Tensor]:
        """Draws rows [K, size] for the chains."""
        sampler = sg.IndependentBatchSampler(len(self.problem.y), size, seed=self.seed)
        return lambda: sampler.draw(self.chains)


@dataclass(frozen=True)
class Method:
    """The constructor of a sampler and its settings.

    Args:
        label: its name.
        build: the chain of a cell.
        steps: the three of a problem: "lr" are multiples of one that heats as much in
            every sampler, "none" is a sampler without any.
        single: whether chains run one by one.
        batches: whether it takes minibatches.
        on: the problems that it can sample.
    """

    label: str
    build: Callable[[Cell], Chain]
    steps: str | tuple[float, ...] = "lr"
    single: bool = False
    batches: bool = True
    on: tuple[str, ...] = ("logistic", "network")


def gradient_variance(problem: Problem, model: nn.Module, seed: int) -> list[Tensor]:
    """The shapes of a single datum's gradients, without chains."""
    rows = sg.IndependentBatchSampler(len(problem.y), 1, seed=seed)
    params = [*model.parameters()]
    chains = len(params[0])
    sums = [torch.zeros_like(p[0]) for p in params]
    for _ in range(100):
        losses = problem.losses(model, rows.draw(chains))
        grads = torch.autograd.grad(losses.sum(), params)
        for total, grad in zip(sums, grads, strict=True):
            total += grad.square().mean(0) / 100
    return sums


def _gradients(
    make: Callable[[Cell], sg.Sampler], *, draws: int = 1
) -> Callable[[Cell], Chain]:
    """A sampler that takes the gradients of minibatches; draws > 1: by a closure."""

    def build(cell: Cell) -> Chain:
        sampler, rows = make(cell), cell.minibatches(cell.size // draws)

        def closure() -> Tensor:
            sampler.zero_grad()
            loss = cell.problem.losses(cell.model, rows()).mean(1).sum()
            loss.backward()
            return loss

        def plain() -> None:
            closure()
            sampler.step()

        act = plain if draws == 1 else lambda: sampler.step(closure)
        return Chain(sampler, act, cost=cell.size // draws * draws)

    return build


def _controlled(make: Callable[[Cell], sg.Sampler]) -> Callable[[Cell], Chain]:
    """Adds control variates: an anchor at the mode; the network's follows the chain."""

    def build(cell: Cell) -> Chain:
        sampler, draw = make(cell), cell.minibatches(cell.size)
        num_data = len(cell.problem.y)

        def loss_fn(rows: Tensor) -> Tensor:
            return cell.problem.losses(cell.model, rows).mean(1).sum()

        everything = [torch.arange(num_data).expand(cell.chains, -1)]
        if cell.problem.name == "logistic":
            estimator = sg.ControlVariates(sampler, loss_fn, progress=False)
            estimator.set_anchor(everything)
            passes = 0
        else:
            every = num_data // cell.size
            estimator = sg.SVRG(
                sampler, loss_fn, everything, refresh_every=every, progress=False
            )
            passes = cell.size  # num_data in every so many steps

        def act() -> None:
            sampler.zero_grad()
            estimator.backward(draw())
            sampler.step()

        return Chain(sampler, act, cost=2 * cell.size + passes)

    return build


def _sgld(cell: Cell) -> sg.Sampler:
    return sg.SGLD(cell.model.named_parameters(), lr=cell.step, **cell.common)


def _psgld(cell: Cell) -> sg.Sampler:
    variances = gradient_variance(cell.problem, cell.model, 0)
    variance = torch.cat([v.flatten() for v in variances])
    root = (variance / cell.size).sqrt().clamp_min(1e-6)
    lr = cell.step * float(root.square().mean() / root.mean())
    return sg.PSGLD(cell.model.named_parameters(), lr=lr, gamma=False, **cell.common)


def _sghmc(noise_estimate: float | str = 0.0) -> Callable[[Cell], sg.Sampler]:
    return lambda cell: sg.SGHMC(
        cell.model.named_parameters(),
        lr=ALPHA * cell.step,
        momentum=1 - ALPHA,
        noise_estimate=noise_estimate,
        **cell.common,
    )


def _baoa(cell: Cell) -> sg.Sampler:
    return sg.BAOA(
        cell.model.named_parameters(),
        lr=ALPHA * cell.step,
        momentum=1 - ALPHA,
        **cell.common,
    )


def _sgnht(cell: Cell) -> sg.Sampler:
    return sg.SGNHT(
        cell.model.named_parameters(),
        lr=ALPHA * cell.step,
        momentum=1 - ALPHA,
        thermostat_rate=THERMOSTAT_RATE,
        **cell.common,
    )


def _ewsg(momentum: float) -> Callable[[Cell], sg.Sampler]:
    return lambda cell: sg.EWSG(
        cell.model.named_parameters(),
        lr=(1 - momentum) * cell.step,
        momentum=momentum,
        num_chains=cell.chains,
        **cell.common,
    )


def _hmc(cell: Cell) -> Chain:
    # In units of the stiffest direction's deviation; HMC is stable below 2.
    num_data = len(cell.problem.y)
    curvature = _largest_curvature(cell.problem, cell.model)
    sampler = sg.HMC(
        cell.model.named_parameters(),
        cell.step / (num_data * curvature) ** 0.5,
        num_steps=NUM_STEPS,
        num_chains=cell.chains,
        **cell.common,
    )

    def closure() -> Tensor:
        losses = cell.problem.all_losses(cell.model)
        losses.sum().backward()
        return losses.detach()

    cost = (NUM_STEPS + 1) * num_data
    return Chain(sampler, lambda: sampler.step(closure), cost=cost)


def _largest_curvature(problem: Problem, model: nn.Module) -> float:
    """The largest curvature, by power iteration on all chains together."""
    params = [*model.parameters()]
    grads = torch.autograd.grad(
        problem.all_losses(model).sum(), params, create_graph=True
    )
    generator = torch.Generator().manual_seed(0)
    v = [torch.randn(p.shape, generator=generator) for p in params]
    size = 1.0
    for _ in range(30):
        v = [t / size for t in v]
        v = list(torch.autograd.grad(grads, params, v, retain_graph=True))
        size = float(sum(t.square().sum() for t in v)) ** 0.5
    return size + 1 / len(problem.y)


def _hmcecs(cell: Cell) -> Chain:
    theta = next(cell.model.double().parameters())
    rows = sg.RowCache(cell.problem.x.double(), cell.problem.y.double())
    closure = sg.PredictorLogLikelihood(
        lambda indices: rows(indices)[0] @ theta[0],
        lambda eta, indices: rows(indices)[1] * eta - torch.nn.functional.softplus(eta),
        rows=lambda indices: rows(indices)[0],
    )
    sampler = sg.HMCECS(
        [theta], subsample_size=cell.size, step_size=cell.step, **cell.common
    )
    sampler.set_anchor(closure, progress=False)
    return Chain(
        sampler,
        lambda: sampler.step(closure),
        spent=lambda: sampler.num_evaluations,
    )


def _sbps(preconditioned: bool) -> Callable[[Cell], Chain]:
    def build(cell: Cell) -> Chain:
        draw = cell.minibatches(cell.size)
        sampler = sg.SBPS(
            cell.model.named_parameters(),
            num_std=3.0,
            preconditioned=preconditioned,
            sample_interval=0.02 if cell.problem.name == "logistic" else 0.1,
            model=cell.model,
            **cell.common,
        )
        return Chain(
            sampler,
            lambda: sampler.step(lambda: cell.problem.losses(cell.model, draw())[0]),
            spent=lambda: sum(sampler.evaluations),
        )

    return build


METHODS = {
    "sgld": Method("SGLD", _gradients(_sgld)),
    "psgld": Method("pSGLD, G frozen", _gradients(_psgld)),
    "sghmc": Method("SGHMC", _gradients(_sghmc())),
    "online": Method("SGHMC, β̂ online", _gradients(_sghmc("online"))),
    "sgnht": Method("SGNHT", _gradients(_sgnht)),
    "ewsg0": Method("EWSG, overdamped", _gradients(_ewsg(0.0), draws=2)),
    "ewsg": Method("EWSG", _gradients(_ewsg(1 - ALPHA), draws=2)),
    "sgld_cv": Method("SGLD, control variates", _controlled(_sgld)),
    "sghmc_cv": Method("SGHMC, control variates", _controlled(_sghmc())),
    "hmc": Method("HMC, all data", _hmc, steps=(0.3, 0.6, 1.2), batches=False),
    "hmcecs": Method(
        "HMC-ECS, perturbed", _hmcecs, (0.1, 0.2, 0.4), single=True, on=("logistic",)
    ),
    "sbps": Method("SBPS", _sbps(False), "none", single=True),
    "psbps": Method("pSBPS", _sbps(True), "none", single=True),
    "baoa": Method("BAOA", _gradients(_baoa)),
}
