"""BAOA: the exact law of its chain on a Gaussian, and what its monitor read."""

import math
import re

import numpy as np
import operator_tensors as tensors
import pytest
import torch
from harness import chains as checks
from harness.methods import METHODS
from harness.statistics import check_z
from harness.targets import Quadratic
from levels import at_levels
from operator_tensors import TARGET as OF_OPERATORS
from reference import Exact, draw
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core import ops as ops

pytestmark = pytest.mark.full

CHAINS = 100_000
BAOA = next(method for method in METHODS if method.name == "BAOA")
# Of a mean loss (θ - CENTRE)² / 2 by minibatches whose gradients are N(0, noise²) off.
CENTRE, START = -0.4, 0.6
PRIOR = {"prior_precision": 3.0, "prior_mean": 0.5}
TARGET = {"num_data": 20.0, "temperature": 0.7, **PRIOR}
HEAT = TARGET["temperature"] / TARGET["num_data"]
PULL = TARGET["prior_precision"] / TARGET["num_data"]
CURVATURE = 1 + PULL
MEAN = (CENTRE + PULL * TARGET["prior_mean"]) / CURVATURE


def friction(momentum):
    return 2 * (1 - momentum) / (1 + momentum)


def experiment(lr, momentum, noise, estimate=0.0):
    blur = np.array([[noise**2]]) if noise else None
    target = Quadratic(np.eye(1), np.array([CENTRE]), blur)
    own = {"lr": lr, "momentum": momentum, "noise_estimate": estimate}
    settings, options = {**TARGET, **own}, {"chains": CHAINS, "dtype": torch.float64}
    return checks.Experiment(BAOA, target, settings, **options, seed=7)


def one_step(*numbers):
    return experiment(*numbers).law.cycle


def set_noisy(p, noise, generator):
    blur = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    p.grad = p.detach() - CENTRE + noise * blur


def started(lr, momentum, estimate=0.0):
    p = nn.Parameter(torch.full((CHAINS,), START, dtype=torch.float64))
    options = {"noise_estimate": estimate, **TARGET}
    return p, sg.BAOA([("theta", p)], lr, momentum, **options, seed=7)


@pytest.mark.parametrize(
    ("momentum", "noise", "part"),
    at_levels(
        [(0.6, 0.0, 0.0), (0.0, 0.5, 0.0), (0.6, 0.5, 0.4), (0.9, 0.2, 0.9)],
        default=[(0.6, 0.5, 0.4)],
        otherwise="full",
    ),
)
def test_the_chain_follows_its_law(momentum, noise, part):
    given = experiment(0.3, momentum, noise, part * friction(momentum))
    checks.check_transient(given, (2, 7, 30))


@pytest.mark.parametrize(
    ("lr", "momentum"), [(0.1, 0.9), (1.0, 0.0), (2.9, 0.5), (2.9, 0.9)]
)
def test_no_step_has_an_error_on_a_quadratic(lr, momentum):
    """And none is unstable up to lr k = 4; SGHMC's variance is 2.4 times as large."""
    given = experiment(lr, momentum, 0.0)
    mean, cov = given.law.cycle.stationary()
    exact = HEAT * np.array([[1 / CURVATURE, lr / 2], [lr / 2, lr]])
    np.testing.assert_allclose(mean, [MEAN, 0.0], atol=1e-12)
    np.testing.assert_allclose(cov, exact, rtol=1e-9)
    checks.check_stationary(given)


@pytest.mark.parametrize(
    ("momentum", "noise", "part"), [(0.9, 0.0, 0.0), (0.0, 0.5, 0.0), (0.9, 0.5, 0.8)]
)
def test_temperatures_see_the_heat_of_minibatches(momentum, noise, part):
    lr, estimate = 0.3, part * friction(momentum)
    p, sampler = started(lr, momentum, estimate)
    step = one_step(lr, momentum, noise, estimate)
    g = torch.Generator().manual_seed(2)
    burn_in, steps = 120, 40
    monitor = sg.TemperatureMonitor(sampler, every=1, center=[MEAN])
    for i in range(burn_in + steps):
        if i == burn_in:
            monitor.reset()
        set_noisy(p, noise, g)
        sampler.step()
    read = monitor.tensor("theta")
    (_, covariance) = step.stationary()
    heat = CURVATURE * covariance[0, 0] / HEAT * TARGET["temperature"]
    # Of 40 steps at least one is independent of all others: no more than its errors.
    error = math.sqrt(2 / CHAINS) * 2 * heat * (1 + noise / math.sqrt(HEAT))
    scores = {
        "configurational": (read.configurational.mean - heat) / error,
        "kinetic": (read.kinetic.mean - heat) / error,
        "excess": read.excess.mean / error,
    }
    check_z(scores, label="BAOA's monitor")
    # Half the mean square of differences of gradients, which θ's move is in, too.
    square = (covariance - step.a @ covariance)[0, 0]
    square += noise**2 * (1 + (1 + momentum) / 2 * lr)
    said = read.minibatch_heating.mean / TARGET["temperature"]
    heating = lr * square / (2 * HEAT) / friction(momentum) - part
    excess = heat / TARGET["temperature"] - 1  # no more than this is said
    assert excess < heating
    check_z({"heating": (said - excess) / error * TARGET["temperature"]}, label="BAOA")


def test_the_summary_recommends_a_momentum():
    lr, noise = 0.02, 0.5
    p, sampler = started(lr, 0.9)
    g = torch.Generator().manual_seed(2)
    monitor = sg.TemperatureMonitor(sampler, every=1)
    for i in range(140):
        if i == 100:
            monitor.reset()
        set_noisy(p, noise, g)
        sampler.step()
    # T_kin - T is β / α, which is to be 5 % of T.
    heat = CURVATURE * one_step(lr, 0.9, noise, 0.0).stationary()[1][0, 0] / HEAT
    said = re.search(r"momentum <= (\S+), .*beta is (\S+) here", monitor.summary())
    assert said is not None
    momentum, beta = map(float, said.groups())
    exact = friction(0.9) * (heat - 1)
    assert friction(momentum) * 0.05 == pytest.approx(exact, rel=0.02)
    assert beta == pytest.approx(exact, rel=0.02)


def reference(param, grad, velocity, noise, h):
    """docs/samplers/baoa.md: the new parameter and the new momentum."""
    x, g, v = param.double(), grad.double(), velocity.double()
    lr, m = h["lr"], h["momentum"]
    pull = h["prior_precision"] / h["num_data"] * x
    u = v - lr * (g + pull)
    scale = v.abs() + lr * (g.abs() + pull.abs())
    variance = (1 - m**2) - (1 + m) ** 2 * h["noise_estimate"] / 2
    jump = math.sqrt(variance * lr * h["temperature"] / h["num_data"]) * noise
    new = Exact(m * u + jump, m * scale + jump.abs())
    theta = x + (u + new.value) / 2
    return Exact(theta, x.abs() + (scale + new.scale) / 2), new


@pytest.mark.default
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_operator_equals_its_reference(temperature, momentum):
    params, grads = tensors.mixed_list(1), tensors.mixed_list(2)
    momenta, offsets = tensors.states(params, 3), tensors.scattered_offsets(params)
    changes = {"temperature": temperature, "momentum": momentum, "noise_estimate": 0.05}
    hyper = {**OF_OPERATORS, **changes}
    noise = draw(params, offsets=offsets, **tensors.STREAM)
    masters, untouched = tensors.masters_of(params), tensors.clones(grads)
    every = zip(tensors.values_of(params, masters), grads, momenta, noise, strict=True)
    expected = [reference(*arguments, hyper) for arguments in every]
    lists, stream = (params, grads, momenta, masters), tensors.STREAM
    ops.baoa_step_(*lists, **hyper, offsets=offsets, **stream)
    tensors.assert_updated(params, masters, [theta for theta, _ in expected])
    tensors.assert_updated(momenta, [], [v for _, v in expected])
    tensors.assert_all_same(grads, untouched)


FRICTION = (
    "must not exceed the friction 2 (1 - momentum) / (1 + momentum) = 0.5: lower "
    "momentum or lr, or take larger minibatches"
)
NO_NOISE = "must be 0 at temperature 0, where no noise is injected"


@pytest.mark.parametrize(
    ("estimate", "options", "message"),
    [
        (0.6, {"momentum": 0.6}, FRICTION),
        (0.05, {"temperature": 0.0}, NO_NOISE),
        ("online", {}, "must be a number, got str"),
    ],
)
def test_refusals(estimate, options, message):
    p = nn.Parameter(torch.zeros(3))
    with pytest.raises((ValueError, TypeError)) as error:
        sg.BAOA([p], 0.1, num_data=10, noise_estimate=estimate, **options)
    assert str(error.value) == f"Invalid noise_estimate: {estimate!r} ({message})"
    sampler = sg.BAOA([p], 0.1, num_data=10, seed=0)
    sampler.param_groups[0].update(options, noise_estimate=estimate)
    p.grad = torch.ones(3)
    with pytest.raises((ValueError, TypeError)):
        sampler.step()
    assert torch.equal(p, torch.zeros(3)) and not sampler.state[p]


def test_schedules_know_it():
    p = nn.Parameter(torch.zeros(3))
    sampler = sg.BAOA([p], lr=0.1, num_data=10, seed=0)
    sampler.param_groups[0]["noise_estimate"] = 0.05
    with pytest.raises(ValueError, match="explores without noise"):
        sg.CyclicalSchedule(sampler, 4)
    sampler.param_groups[0]["noise_estimate"] = 0.0
    schedule = sg.CyclicalSchedule(sampler, 4, exploration=0.5)
    temperatures = []
    for _ in range(8):
        temperatures.append(sampler.param_groups[0]["temperature"])
        p.grad = p.detach().clone()
        sampler.step()
        schedule.step()
    assert temperatures == [0, 0, 1, 1] * 2
