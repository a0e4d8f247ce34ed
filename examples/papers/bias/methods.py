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
class Method:
    """How a sampler is built.

    Args:
        label: its name.
        build: (problem, model, step, batch size, seed) → Chain.
        steps: the three of a problem: "lr" are multiples of one that heats as much in
            every sampler, "none" is a sampler without any.
        single: whether chains run one by one.
        batches: whether it takes minibatches.
        on: the problems that it can sample.
    """

    label: str
    build: Callable[[Problem, nn.Module, float, int, int], Chain]
    steps: str | tuple[float, ...] = "lr"
    single: bool = False
    batches: bool = True
    on: tuple[str, ...] = ("logistic", "network")


def gradient_variance(problem: Problem, model: nn.Module, seed: int) -> list[Tensor]:
    """Of a single datum's gradient, for each parameter, without its chains."""
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


def _minibatches(problem: Problem, model: nn.Module, size: int, seed: int) -> Any:
    """Draws rows [K, n] for the chains."""
    chains = len(next(model.parameters()))
    sampler = sg.IndependentBatchSampler(len(problem.y), size, seed=seed)
    return lambda: sampler.draw(chains)


def _common(problem: Problem, seed: int) -> dict[str, Any]:
    return {"num_data": len(problem.y), "prior_precision": 1.0, "seed": seed}


def _gradients(
    make: Callable[[Problem, nn.Module, float, int, int], sg.Sampler],
    *,
    draws: int = 1,
) -> Callable[[Problem, nn.Module, float, int, int], Chain]:
    """A sampler that takes the gradients of minibatches; draws > 1: by a closure."""

    def build(
        problem: Problem, model: nn.Module, step: float, size: int, seed: int
    ) -> Chain:
        sampler = make(problem, model, step, size, seed)
        rows = _minibatches(problem, model, size // draws, seed)

        def closure() -> Tensor:
            sampler.zero_grad()
            loss = problem.losses(model, rows()).mean(1).sum()
            loss.backward()
            return loss

        def plain() -> None:
            closure()
            sampler.step()

        act = plain if draws == 1 else lambda: sampler.step(closure)
        return Chain(sampler, act, cost=size // draws * draws)

    return build


def _controlled(
    make: Callable[[Problem, nn.Module, float, int, int], sg.Sampler],
) -> Callable[[Problem, nn.Module, float, int, int], Chain]:
    """With an anchor at the mode; the network's follows the chain."""

    def build(
        problem: Problem, model: nn.Module, step: float, size: int, seed: int
    ) -> Chain:
        sampler = make(problem, model, step, size, seed)
        draw = _minibatches(problem, model, size, seed)
        chains = len(next(model.parameters()))
        num_data = len(problem.y)

        def loss_fn(rows: Tensor) -> Tensor:
            return problem.losses(model, rows).mean(1).sum()

        everything = [torch.arange(num_data).expand(chains, -1)]
        if problem.name == "logistic":
            estimator = sg.ControlVariates(sampler, loss_fn, progress=False)
            estimator.set_anchor(everything)
            passes = 0
        else:
            every = num_data // size
            estimator = sg.SVRG(
                sampler, loss_fn, everything, refresh_every=every, progress=False
            )
            passes = size  # num_data in every so many steps

        def act() -> None:
            sampler.zero_grad()
            estimator.backward(draw())
            sampler.step()

        return Chain(sampler, act, cost=2 * size + passes)

    return build


def _sgld(
    problem: Problem, model: nn.Module, step: float, size: int, seed: int
) -> sg.Sampler:
    return sg.SGLD(model.named_parameters(), lr=step, **_common(problem, seed))


def _psgld(
    problem: Problem, model: nn.Module, step: float, size: int, seed: int
) -> sg.Sampler:
    variance = torch.cat([v.flatten() for v in gradient_variance(problem, model, 0)])
    root = (variance / size).sqrt().clamp_min(1e-6)
    lr = step * float(root.square().mean() / root.mean())
    return sg.PSGLD(
        model.named_parameters(), lr=lr, gamma=False, **_common(problem, seed)
    )


def _sghmc(noise_estimate: float | str = 0.0) -> Any:
    def make(
        problem: Problem, model: nn.Module, step: float, size: int, seed: int
    ) -> sg.Sampler:
        return sg.SGHMC(
            model.named_parameters(),
            lr=ALPHA * step,
            momentum=1 - ALPHA,
            noise_estimate=noise_estimate,
            **_common(problem, seed),
        )

    return make


def _sgnht(
    problem: Problem, model: nn.Module, step: float, size: int, seed: int
) -> sg.Sampler:
    return sg.SGNHT(
        model.named_parameters(),
        lr=ALPHA * step,
        momentum=1 - ALPHA,
        thermostat_rate=THERMOSTAT_RATE,
        **_common(problem, seed),
    )


def _ewsg(momentum: float) -> Any:
    def make(
        problem: Problem, model: nn.Module, step: float, size: int, seed: int
    ) -> sg.Sampler:
        return sg.EWSG(
            model.named_parameters(),
            lr=(1 - momentum) * step,
            momentum=momentum,
            num_chains=len(next(model.parameters())),
            **_common(problem, seed),
        )

    return make


def _hmc(
    problem: Problem, model: nn.Module, step: float, size: int, seed: int
) -> Chain:
    # In units of the stiffest direction's deviation; HMC is stable below 2.
    curvature = _largest_curvature(problem, model)
    sampler = sg.HMC(
        model.named_parameters(),
        step / (len(problem.y) * curvature) ** 0.5,
        num_steps=NUM_STEPS,
        num_chains=len(next(model.parameters())),
        **_common(problem, seed),
    )

    def closure() -> Tensor:
        losses = problem.all_losses(model)
        losses.sum().backward()
        return losses.detach()

    return Chain(
        sampler, lambda: sampler.step(closure), cost=(NUM_STEPS + 1) * len(problem.y)
    )


def _largest_curvature(problem: Problem, model: nn.Module) -> float:
    """By power iteration on all chains together."""
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


def _hmcecs(
    problem: Problem, model: nn.Module, step: float, size: int, seed: int
) -> Chain:
    model.double()
    theta = next(model.parameters())
    rows = sg.GatheredRows(problem.x.double(), problem.y.double())
    closure = sg.LogLikelihood(
        lambda indices: rows(indices)[0] @ theta[0],
        lambda eta, indices: rows(indices)[1] * eta - torch.nn.functional.softplus(eta),
        rows=lambda indices: rows(indices)[0],
    )
    sampler = sg.HMCECS(
        [theta], subsample_size=size, step_size=step, **_common(problem, seed)
    )
    sampler.set_anchor(closure, progress=False)
    return Chain(
        sampler,
        lambda: sampler.step(closure),
        spent=lambda: sampler.num_evaluations,
    )


def _sbps(preconditioned: bool) -> Any:
    def build(
        problem: Problem, model: nn.Module, step: float, size: int, seed: int
    ) -> Chain:
        draw = _minibatches(problem, model, size, seed)
        sampler = sg.SBPS(
            model.named_parameters(),
            confidence=3.0,
            preconditioned=preconditioned,
            sample_interval=0.02 if problem.name == "logistic" else 0.1,
            model=model,
            **_common(problem, seed),
        )
        return Chain(
            sampler,
            lambda: sampler.step(lambda: problem.losses(model, draw())[0]),
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
}
