"""A line of the table: chains from a mode, their draws, monitor and errors."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torch_sgmcmc as sg
from torch_sgmcmc.diagnostics.temperature_means import BatchMeans

from .methods import METHODS, Cell, Chain, gradient_variance
from .problems import Problem

CHAINS = 4
_BURN_IN = 1 / 3
# Draws that are kept of a chain, and those whose T_conf is computed without monitor.
_DRAWS, _LOOKS = 1500, 300
# Heating by minibatches of 100 (of 20,000) at the middle step: a fifth of T.
_HEATING = 0.2


class Truth:
    """NUTS's results: moments of θ or of the test rows' probabilities."""

    def __init__(self, path: Path, problem: Problem) -> None:
        with np.load(path) as data:
            self.p_mean = torch.from_numpy(data["p_mean"])
            if problem.name == "logistic":
                draws = torch.from_numpy(data["draws"]).flatten(0, 1)
                self.mean, self.sd = draws.mean(0), draws.std(0)
                self.precision = torch.linalg.inv(draws.T.cov())
            else:
                self.mean, self.sd = self.p_mean, torch.from_numpy(data["p_sd"])
                self.precision = None
        self.nll = nll(self.p_mean, problem)


def nll(p: Tensor, problem: Problem) -> float:
    """Mean negative log-likelihood of the test labels."""
    p = p.double().clamp(1e-12, 1 - 1e-12)
    y = problem.test_y.double()
    return float(-(y * p.log() + (1 - y) * (1 - p).log()).mean())


def modes(problem: Problem, chains: int = CHAINS) -> nn.Module:
    """Chains at modes, by L-BFGS from random points."""
    model = problem.model(chains)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3, generator=generator)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=300, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = problem.all_losses(model).sum() + penalty / (2 * len(problem.y))
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def step_unit(problem: Problem, model: nn.Module, batch_size: int) -> float:
    """The e at which minibatches of so many are expected to heat by a fifth of T."""
    variance = torch.cat([v.flatten() for v in gradient_variance(problem, model, 0)])
    return 2 * _HEATING * batch_size / (len(problem.y) * float(variance.mean()))


def line(
    problem: Problem,
    truth: Truth,
    start: nn.Module,
    key: str,
    step: float,
    batch_size: int,
    passes: float,
) -> dict[str, Any]:
    """Runs a sampler's chains and compares them with the truth."""
    method, began = METHODS[key], time.perf_counter()
    parts = []
    groups = [[c] for c in range(CHAINS)] if method.single else [[*range(CHAINS)]]
    for seed, which in enumerate(groups):
        model = problem.model(len(which))
        with torch.no_grad():
            for p, q in zip(model.parameters(), start.parameters(), strict=True):
                p.copy_(q[which])
        chain = method.build(Cell(problem, model, step, batch_size, seed))
        parts.append(_run(problem, model, chain, passes))
    # A particle's samples are at equal times, of which no two paths have as many.
    shortest = min(part["samples"].shape[1] for part in parts)
    samples = torch.cat([part["samples"][:, :shortest] for part in parts])
    result = _errors(problem, truth, samples, torch.cat([p["p"] for p in parts]))
    for name in ("kinetic", "configurational"):
        values = [part[name] for part in parts]
        result[name] = [
            float(np.mean([v[0] for v in values])),
            float(np.hypot.reduce([v[1] for v in values]) / len(values)),
        ]
    result["cost"] = float(np.mean([part["cost"] for part in parts]))
    result["notes"] = [part["note"] for part in parts if part["note"]]
    return result | {"seconds": time.perf_counter() - began}


def _run(
    problem: Problem, model: nn.Module, chain: Chain, passes: float
) -> dict[str, Any]:
    sampler, budget = chain.sampler, passes * len(problem.y)
    chains = len(next(model.parameters()))
    thermal = chain.cost is not None and not isinstance(sampler, sg.HMC)
    monitor = (
        sg.TemperatureMonitor(sampler, every=20, center="current") if thermal else None
    )
    centers = [p.detach().clone() for p in model.parameters()]
    conf = BatchMeans()  # T_conf by gradients of all data
    kept: list[Tensor] = []

    def keep(*_: Any) -> None:
        kept.append(
            torch.cat([p.detach().flatten(1) for p in model.parameters()], 1).float()
        )

    if isinstance(sampler, sg.SBPS):
        sampler.register_sample_hook(keep)

    at_burn_in, steps, looked = False, 0, 0
    thin = 1
    if chain.cost is not None:
        all_steps = int(budget / chain.cost)
        thin = max(1, int(all_steps * (1 - _BURN_IN)) // _DRAWS)
    note = ""
    while True:
        spent = steps * chain.cost if chain.cost is not None else chain.spent()
        if not at_burn_in and spent >= _BURN_IN * budget:
            at_burn_in = True
            kept.clear()
            if monitor is not None:
                monitor.reset()
            for group in sampler.param_groups:
                if isinstance(sampler, (sg.PSGLD, sg.SBPS)):
                    group["adapt"] = False
        if spent >= budget:
            break
        try:
            chain.step()
        except (RuntimeError, ValueError) as error:
            note = str(error).split("\n")[0].split(" (")[0][:120]
            break
        steps += 1
        if at_burn_in:
            if not isinstance(sampler, sg.SBPS) and steps % thin == 0:
                keep()
            if not thermal:
                share = (spent / budget - _BURN_IN) / (1 - _BURN_IN)
                if share * _LOOKS >= looked:
                    looked += 1
                    conf.add(_configurational(problem, model, sampler, centers))
    if note or len(kept) < 4:
        nan = [math.nan, math.nan]
        width = sum(p[0].numel() for p in model.parameters())
        bad = torch.full((chains, 4, width), math.nan)
        return {
            "samples": bad if problem.name == "logistic" else bad[:, :, :1],
            "p": torch.full((chains, len(problem.test_y)), math.nan),
            "kinetic": nan,
            "configurational": nan,
            "cost": spent / len(problem.y),
            "note": note or "too few draws",
        }
    # [K, S, d]
    samples = torch.stack(kept, 1)
    if samples.shape[1] > 2 * _DRAWS:
        samples = samples[:, :: samples.shape[1] // _DRAWS]
    probabilities = _probabilities(problem, model, samples)
    kinetic, configurational = (math.nan, math.nan), (conf.mean, conf.half_width(0.95))
    if monitor is not None:
        kinetic, configurational, *_ = monitor.all()
    return {
        "samples": samples if problem.name == "logistic" else probabilities,
        "p": probabilities.mean(1),
        "kinetic": list(kinetic),
        "configurational": list(configurational),
        "cost": spent / len(problem.y),
        "note": "",
    }


def _configurational(
    problem: Problem, model: nn.Module, sampler: sg.Sampler, centers: list[Tensor]
) -> float:
    """T_conf where the chains are, by gradients of all data."""
    params, group = list(model.parameters()), sampler.param_groups[0]
    loss = problem.all_losses(model).sum()
    decay = group["prior_precision"] / group["num_data"]
    total = 0.0
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for p, grad, center in zip(params, grads, centers, strict=True):
            total += float(((p - center) * (grad + decay * p)).sum())
    return group["num_data"] * total / sum(p.numel() for p in params)


@torch.no_grad()
def _probabilities(problem: Problem, model: nn.Module, samples: Tensor) -> Tensor:
    """Probabilities of the test rows, [K, S', rows], for a tenth of the draws."""
    chains, count, _ = samples.shape
    if problem.name == "logistic":
        samples = samples[:, :: max(1, count // 200)]
        return torch.sigmoid(samples @ problem.test_x.T)
    samples = samples[:, :: max(1, count // 500)]
    many = problem.model(chains * samples.shape[1])
    flat, at = samples.flatten(0, 1), 0
    for p in many.parameters():
        size = p[0].numel()
        p.copy_(flat[:, at : at + size].view_as(p))
        at += size
    logits = many(problem.test_x[None])
    return torch.sigmoid(logits).view(chains, samples.shape[1], -1)


def _errors(
    problem: Problem, truth: Truth, samples: Tensor, p: Tensor
) -> dict[str, Any]:
    """Errors of moments, pooled over the chains, with jackknife standard errors."""
    chains = len(samples)
    means = samples.double().mean(1)
    squares = samples.double().square().mean(1)

    def moments(which: list[int]) -> tuple[float, float]:
        mean, square = means[which].mean(0), squares[which].mean(0)
        sd = (square - mean.square()).clamp_min(0).sqrt()
        off = ((mean - truth.mean) / truth.sd).square().mean().sqrt()
        return float(off), float(100 * (sd / truth.sd - 1).mean())

    off, sd = moments([*range(chains)])
    without = np.array(
        [moments([i for i in range(chains) if i != j]) for j in range(chains)]
    )
    spread = np.sqrt((chains - 1) * without.var(0))
    worse = np.array([nll(row, problem) - truth.nll for row in p])
    result = {
        "mean_error": [off, float(spread[0])],
        "sd_error": [sd, float(spread[1])],
        "nll": [
            1e3 * float(worse.mean()),
            1e3 * float(worse.std(ddof=1)) / chains**0.5,
        ],
    }
    if truth.precision is not None:
        centred = (samples.double() - samples.double().mean((0, 1))).flatten(0, 1)
        covariance = centred.T @ centred / len(centred)
        result["variance"] = float(
            (truth.precision @ covariance).trace() / len(truth.sd)
        )
    return result
