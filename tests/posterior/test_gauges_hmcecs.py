"""Gauges of HMC-ECS: temperatures of the estimated density that it samples.

Fixed seeds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ecs_data import Data, N, chain, make

import torch_sgmcmc as sg
import torch_sgmcmc.hmcecs as hmcecs_module
from torch_sgmcmc.ecs.target import Point, SubsampledTarget

# Sampled laws, but for what is marked as quick.
pytestmark = pytest.mark.slow

Settings = dict[str, Any]

RIGHT: dict[str, tuple[str, torch.dtype, Settings]] = {
    "tempered": (
        "logistic",
        torch.float32,
        {"temperature": 0.5, "mass_matrix": "diagonal"},
    ),
    # What a subsample leaves out is there to see.
    "first": (
        "logistic",
        torch.float64,
        {"control_variate": 1, "subsample_size": 40},
    ),
    "signed-first": (
        "logistic",
        torch.float64,
        {"variant": "signed", "control_variate": 1, "num_products": 30},
    ),
}


def observed(
    kind: str, dtype: torch.dtype, settings: Settings
) -> tuple[sg.HMCECS, Data, sg.Gauges]:
    """A chain that has been a while under way, and its gauges."""
    data = Data(kind, dtype)
    sampler = make(data, **settings)
    sampler.warmup(data, 60, anchor_every=15, progress=False)
    gauges = sg.Gauges(sampler, every=1, center="current", names=["weight", "bias"])
    return sampler, data, gauges


@pytest.mark.parametrize("name", RIGHT)
def test_both_temperatures_are_the_one_asked_for(name: str) -> None:
    """To 3.5 standard errors, of the position and of the motion, each tensor's."""
    sampler, data, gauges = observed(*RIGHT[name])
    chain(sampler, data, 1000)
    assert 0.3 < sampler.acceptance_rate < 1.0
    temperature = sampler.param_groups[0]["temperature"]
    for tensor in (0, 1):
        kinetic, configurational, excess, *_ = gauges.tensor(tensor)
        assert excess.half_width < 0.3 * temperature
        for reading, expected in (
            (kinetic, temperature),
            (configurational, temperature),
            (excess, 0.0),
        ):
            assert abs(reading.mean - expected) < 1.75 * reading.half_width
    assert gauges.findings() == []


def test_the_temperature_is_that_of_the_samples() -> None:
    """With exact control variates of a Gaussian: E (θ − θ*)ᵀ H (θ − θ*) = T d."""
    sampler, data, gauges = observed("gaussian", torch.float64, {})
    draws = torch.stack(chain(sampler, data, 1000)).detach()
    x = torch.cat([data.x, torch.ones(N, 1, dtype=torch.float64)], dim=1)
    hessian = x.T @ x + torch.eye(4, dtype=torch.float64)
    from_mean = draws - torch.linalg.solve(hessian, x.T @ data.y)
    squares = torch.einsum("ti,ij,tj->t", from_mean, hessian, from_mean) / 4
    batches = np.reshape(squares.numpy(), (20, -1)).mean(axis=1)
    error = batches.std(ddof=1) / np.sqrt(20)
    read = gauges.all().configurational
    assert abs(read.mean - batches.mean()) < 4 * error + 1.75 * read.half_width
    assert error < 0.07 and read.half_width < 0.14


def _momenta(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    draw = hmcecs_module.hmc_momenta_
    monkeypatch.setattr(
        hmcecs_module,
        "hmc_momenta_",
        lambda *args, **given: draw(*args, **{**given, "temperature": temperature}),
    )


def _hot(monkeypatch: pytest.MonkeyPatch) -> None:
    _momenta(monkeypatch, 2.0)


def _not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hmcecs_module, "hmc_momenta_", lambda lists, *_, **__: lists[0].zero_()
    )


def _accept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sg.HMCECS, "_decide", lambda *_: True)


def _half_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    at = SubsampledTarget.at

    def halved(*args: Any) -> Point:
        point = at(*args)
        point.gradient = point.gradient / 2
        return point

    monkeypatch.setattr(SubsampledTarget, "at", halved)


@pytest.mark.parametrize(
    ("bug", "fault"),
    [
        (_hot, "hot"),
        (_not_drawn, "cold"),
        (_accept_all, "not in equilibrium"),
        (_half_gradient, "not in equilibrium"),
    ],
)
def test_known_bugs_are_seen(
    bug: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, data, gauges = observed("gaussian", torch.float64, {})
    if bug is _accept_all:  # which small steps do not need to be told
        sampler.param_groups[0].update(step_size=1.6, trajectory_length=4.8)
    bug(monkeypatch)
    for _ in range(5):
        chain(sampler, data, 100)
        # Five looks, at one's rate of false alarms.
        if fault in {found.fault for found in gauges.findings(rate=0.002)}:
            return
    raise AssertionError(gauges.summary())


@pytest.mark.quick
def test_gauges_change_no_bit_of_the_chain() -> None:
    chains = []
    for detached in (False, True):
        sampler, data, gauges = observed(*RIGHT["signed-first"])
        if detached:
            gauges.detach()
        draws = chain(sampler, data, 20)
        assert gauges.num_observed == (0 if detached else 20)
        chains.append(torch.stack(draws))
    assert torch.equal(*chains)


@pytest.mark.quick
def test_observe_has_the_temperature_by_all_data() -> None:
    """T_conf beside T, by the gradient that the closure leaves."""
    data = Data("gaussian")
    sampler = make(data)
    gauges = sg.Gauges(sampler)
    gauges.observe(lambda: (-data(torch.arange(N)).mean()).backward())
    x, theta = data.x, data.weight.detach()
    force = (x @ theta + data.bias.detach() - data.y) @ x + theta
    assert gauges.tensor(0).configurational.mean == pytest.approx(
        float(theta @ force) / 3, rel=1e-12
    )
    assert gauges.tensor(0).kinetic.mean == 1.0
