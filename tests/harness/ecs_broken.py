"""HMCECS on the experiments of ``harness.ecs``, and known bugs put into it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import torch_sgmcmc as sg
from harness.ecs import Experiment, Observed, State
from torch_sgmcmc.samplers._ecs import target as parts
from torch_sgmcmc.samplers._ecs.subsample import Subsample, layout_of
from torch_sgmcmc.samplers._ecs.target import (
    _OF_SUBSAMPLE,
    Estimator,
    Point,
    SubsampledTarget,
    Sweep,
)
from torch_sgmcmc.samplers._ecs.taylor import Prior


def run_sampler(
    experiment: Experiment, *, replicates: int, steps: int, seed: int = 11
) -> Observed:
    """One sampler, put back into a draw of the exact law every ``steps`` steps.

    Its randomness depends on how many steps it has made, so that replicates are
    independent.
    """
    model, signed = experiment.model, experiment.num_factors > 0
    p = torch.tensor([model.anchor], dtype=torch.float64, requires_grad=True)
    sampler = sg.HMCECS(
        [p],
        num_data=model.n,
        subsample_size=model.m,
        estimator="signed" if signed else "perturbed",
        num_factors=max(1, experiment.num_factors),
        num_blocks=experiment.num_blocks,
        taylor_order=model.order,
        mass_matrix="identity",
        prior_precision=model.prior,
        step_size=experiment.step_size,
        trajectory_length=experiment.step_size * experiment.num_steps,
        seed=seed,
    )
    closure = model.closure(p)
    sampler.set_anchor(closure, progress=False)
    if signed:  # as a warm-up leaves it: a is λ less than the mean of d̂ there
        mean = experiment.lower_bound + experiment.num_factors
        sampler._set(mean_difference=mean)
    starts = experiment.draw(np.random.default_rng(seed), replicates)
    kept: list[tuple[float, ...]] = []
    for i in range(replicates):
        _put(sampler, closure, p, State(*(part[i] for part in starts)), signed)
        for _ in range(steps):
            before = _counters(sampler)
            sampler.step(closure)
            size = sampler.estimator_variance
            if signed:
                size = len(sampler.state["subsample"]["indices"]) / model.m
            passed = (b - a for a, b in zip(before, _counters(sampler), strict=True))
            kept.append((p.item(), sampler.sign, size, *passed))
    columns = np.array(kept).reshape(replicates, steps, 5)
    theta, sign, size, accepted, renewed = np.moveaxis(columns, 2, 0)
    return Observed(theta, sign, size, accepted > 0, renewed > 0)


def _counters(sampler: sg.HMCECS) -> tuple[int, int]:
    group = sampler.param_groups[0]
    return group["num_accepted"], group["num_subsamples_accepted"]


def _put(
    sampler: sg.HMCECS, closure: Any, p: Tensor, state: State, signed: bool
) -> None:
    """Gives the sampler θ and u of one chain."""
    u = state.u
    if signed:
        used = zip(u, state.counts, strict=True)
        u = np.concatenate([cell[:number] for cell, number in used])
    indices = torch.from_numpy(u.reshape(-1).copy())
    terms = sampler._target(sampler._data(closure)).expand(indices)
    kept = Subsample(state.counts.tolist(), indices, terms)
    layout = layout_of(sampler.param_groups[0])
    sampler.state["subsample"] = kept.save(layout)
    with torch.no_grad():
        p.fill_(float(state.theta))


# Makes what brings a bug about for as long as it is entered.
Patch = Callable[[], AbstractContextManager[Any]]
HMCECS: Any = sg.HMCECS


def _estimate(change: Callable[[Tensor, Tensor, float], None]) -> Any:
    """Changes weights and numbers (log, variance, mean, sign) of an estimate in place.

    The last argument is N / m.
    """
    right = parts.ecs_estimate

    def wrong(values: Tensor, *rest: Any, **sizes: Any) -> Any:
        weights, hessian_terms, numbers = right(values, *rest, **sizes)
        change(weights, numbers, sizes["num_data"] / max(1, len(values)))
        return weights, hessian_terms, numbers

    return mock.patch.object(parts, "ecs_estimate", wrong)


def _left_out(weights: Tensor, numbers: Tensor, scale: float) -> None:
    weights.fill_(scale)
    numbers[0] = numbers[2]


def _without_its_gradient(weights: Tensor, numbers: Tensor, scale: float) -> None:
    weights.fill_(scale)


def _ignored(weights: Tensor, numbers: Tensor, scale: float) -> None:
    numbers[3] = 1


def _target(change: Callable[[Any, SubsampledTarget], SubsampledTarget]) -> Any:
    right = HMCECS._target
    return mock.patch.object(
        HMCECS, "_target", lambda self, closure: change(self, right(self, closure))
    )


def _with_a_gradient(sampler: Any, target: SubsampledTarget) -> SubsampledTarget:
    everything = torch.arange(sampler.param_groups[0]["num_data"])
    (p,) = target.data.params
    present = p.detach().clone()
    parts.place([p], target.anchor.theta)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(target.data.closure(everything).sum(), p)
    parts.place([p], present)
    sums = replace(target.anchor.sums, gradient=gradient)
    return replace(target, anchor=replace(target.anchor, sums=sums))


class _Along:
    """A target with a bug that replaces the trajectory's."""

    def __init__(
        self, target: SubsampledTarget, at: Callable[[Subsample, Tensor], Point]
    ) -> None:
        self.target, self.at = target, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


def _along(change: Callable[[Any, Sweep, Point, Any], Any]) -> Any:
    """Replaces the trajectory's part of a step."""
    right = Sweep.update_parameters
    return mock.patch.object(
        Sweep,
        "update_parameters",
        lambda self, present, *sizes: change(right, self, present, sizes),
    )


def _fresh(*, forces_alone: bool) -> Any:
    number = count(2**20)

    def wrong(right: Any, sweep: Sweep, present: Point, sizes: Any) -> Any:
        target, counts = sweep.target, present.subsample.counts
        estimator = target.estimator
        layout = {
            "num_data": target.data.num_data,
            "num_cells": len(counts),
            "num_blocks": len(counts),
            "batch_size": estimator.batch_size,
            "poisson": estimator.num_factors > 0,
            "seed": target.data.seed,
        }

        def at(subsample: Subsample, theta: Tensor) -> Point:
            drawn = layout, next(number), target.expand, theta.device
            there = target.at(Subsample.draw(*drawn), theta)
            if not forces_alone:
                return there
            return replace(target.at(subsample, theta), gradient=there.gradient)

        along: Any = _Along(target, at)
        return right(replace(sweep, target=along), present, *sizes)

    return _along(wrong)


def _energy_of_all_data() -> Any:
    def wrong(right: Any, sweep: Sweep, present: Point, sizes: Any) -> Any:
        target = sweep.target

        def exact(point: Point) -> Point:
            parts.place(target.data.params, point.theta)
            everything = torch.arange(target.data.num_data)
            log = float(target.data.closure(everything).sum())
            return replace(point, log=log - float(target.prior.energy(point.theta)))

        def at(subsample: Subsample, theta: Tensor) -> Point:
            return exact(target.at(subsample, theta))

        along: Any = _Along(target, at)
        wronged = right(replace(sweep, target=along), exact(present), *sizes)
        point, ratio, moved = wronged
        return target.at(point.subsample, point.theta), ratio, moved

    return _along(wrong)


def _u_always_accepted() -> Any:
    right = Sweep._decide

    def wrong(self: Any, log_ratio: float, test: int) -> bool:
        return test == _OF_SUBSAMPLE or right(self, log_ratio, test)

    return mock.patch.object(Sweep, "_decide", wrong)


def _bound_without_factors() -> Any:
    def change(_: Any, target: SubsampledTarget) -> SubsampledTarget:
        estimator = target.estimator
        bound = estimator.lower_bound + estimator.num_factors
        sizes = estimator.batch_size, estimator.num_factors
        wrong = Estimator(estimator.num_data, *sizes, bound)
        return replace(target, estimator=wrong)

    return _target(change)


def _no_prior() -> Any:
    def change(_: Any, target: SubsampledTarget) -> SubsampledTarget:
        none = torch.zeros_like(target.prior.precision)
        return replace(target, prior=Prior(none, target.prior.mean))

    return _target(change)


# What either estimator does by the same code is broken in one of them.
BUGS: dict[str, Patch] = {
    "fresh u inside the trajectory": lambda: _fresh(forces_alone=False),
    "Metropolis test with the energy of all data": _energy_of_all_data,
    "u always accepted": _u_always_accepted,
    "correction left out": lambda: _estimate(_left_out),
}
SIGNED_BUGS: dict[str, Patch] = {
    "prior missing": _no_prior,
    "sign ignored": lambda: _estimate(_ignored),
    "a without λ": _bound_without_factors,
}
ORDER_BUGS: dict[str, Patch] = {
    "gradient left in the sum of q": lambda: _target(_with_a_gradient)
}
FORCE_BUGS: dict[str, Patch] = {
    "correction without its gradient": lambda: _estimate(_without_its_gradient),
    "fresh u in the forces": lambda: _fresh(forces_alone=True),
}
