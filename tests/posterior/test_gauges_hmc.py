"""Gauges of HMC: with the Metropolis test T, and without it what heats.

Fixed seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torch_sgmcmc as sg
import torch_sgmcmc.chain.hamiltonian as hmc_module

# Sampled laws, but for what is marked as quick.
pytestmark = pytest.mark.slow

N, PRIOR = 100.0, 20.0
SHAPE = (16, 32)
CURVATURES = torch.linspace(0.5, 2.0, 512).view(SHAPE)
Settings = dict[str, Any]

#: Settings, the spread of gradients' noise, and whether T_conf is N k Var(θ) at the
#: starts of trajectories (along them noise adds up).
RIGHT: dict[str, tuple[Settings, float, bool]] = {
    "metropolis": ({"step_size": 0.05, "num_steps": 7}, 0.0, True),
    "metropolis-mass": (
        {"step_size": 0.45, "num_steps": 4, "temperature": 0.5, "mass": True},
        0.0,
        True,
    ),
    "metropolis-kept": (
        {"step_size": 0.05, "num_steps": 3, "resample_momentum_every": 3},
        0.0,
        True,
    ),
    "leapfrog": ({"step_size": 0.07, "num_steps": 5, "metropolis": False}, 0.0, True),
    "one-step": ({"step_size": 0.05, "num_steps": 1, "metropolis": False}, 0.4, True),
    "naive": ({"step_size": 0.04, "num_steps": 3, "metropolis": False}, 0.1, False),
    "naive-mass": (
        {"step_size": 0.4, "num_steps": 3, "metropolis": False, "mass": True},
        0.1,
        False,
    ),
    "naive-kept": (
        {
            **{"step_size": 0.03, "num_steps": 2, "metropolis": False},
            "resample_momentum_every": 4,
        },
        0.1,
        False,
    ),
}


class Chain:
    """HMC on a Gaussian, observed, with gradients scaled and noisy as is asked."""

    def __init__(
        self,
        settings: Settings,
        spread: float = 0.0,
        *,
        gradient: float = 1.0,
        loss: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        start = torch.randn(SHAPE, generator=generator) / math.sqrt(N)
        self.p = nn.Parameter(start.to(dtype))
        self.spread, self.gradient, self.loss = spread, gradient, loss
        self.noise = torch.Generator().manual_seed(5)
        own = {key: value for key, value in settings.items() if key != "mass"}
        target: Settings = {"num_data": N, "prior_precision": PRIOR, "seed": 3}
        self.sampler = sg.HMC([self.p], **own, **target)
        if "mass" in settings:
            self.sampler.set_mass([torch.linspace(100, 200, 512).view(SHAPE)])
        self.gauges = sg.Gauges(self.sampler, every=3)

    def closure(self) -> Tensor:
        x = self.p.detach()
        noise = torch.randn(x.shape, generator=self.noise)
        grad = self.gradient * CURVATURES * x + self.spread * noise
        self.p.grad = grad.to(x.dtype)
        return self.loss / 2 * (CURVATURES * x.double().square()).sum()

    def run(self, steps: int) -> list[float]:
        """N k θ² by coordinate, where each trajectory starts."""
        k, seen = CURVATURES.double() + PRIOR / N, []
        for _ in range(steps):
            theta = self.sampler.state.get(self.p, {}).get("master", self.p)
            seen.append(float((k * theta.detach().double() ** 2).mean()) * N)
            self.sampler.step(self.closure)
        return seen

    @property
    def faults(self) -> set[str]:
        return {found.fault for found in self.gauges.findings()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("metropolis-mass", torch.float32),
        ("metropolis-kept", torch.bfloat16),
        ("one-step", torch.float32),
        ("naive-mass", torch.float32),
        ("naive-kept", torch.bfloat16),
    ],
)
def test_both_temperatures_are_those_of_the_samples(name: str, dtype: Any) -> None:
    """T_kin = T_conf, and N k Var(θ), to 3.5 standard errors."""
    settings, spread, is_at_start = RIGHT[name]
    chain = Chain(settings, spread, dtype=dtype)
    chain.run(100)
    chain.gauges.reset()
    seen = chain.run(1000)
    kinetic, configurational, excess, minibatch, bias, _ = chain.gauges.all()
    assert math.isnan(minibatch.mean) and math.isnan(bias.mean)
    assert excess.half_width < 0.07
    assert abs(excess.mean) < 1.75 * excess.half_width
    if is_at_start:
        batches = np.reshape(seen, (20, -1)).mean(axis=1)
        error = batches.std(ddof=1) / math.sqrt(20)
        assert abs(configurational.mean - batches.mean()) < 4 * error + 0.01
    temperature = settings.get("temperature", 1.0)
    if "metropolis" in name:
        assert abs(kinetic.mean - temperature) < 1.75 * kinetic.half_width
        assert chain.faults == set()
    else:
        assert kinetic.mean > 1.05
        assert chain.faults == {"hot"}
        assert "SGHMC is what they need" in chain.gauges.summary()


def test_without_the_test_the_leapfrogs_error_is_known_exactly() -> None:
    """On a quadratic with exact gradients N k Var(θ) = T / (1 − ε² N k / 4)."""
    settings, _, _ = RIGHT["leapfrog"]
    chain = Chain(settings)
    chain.run(100)
    chain.gauges.reset()
    chain.run(1000)
    k = N * CURVATURES + PRIOR
    expected = float((1 / (1 - settings["step_size"] ** 2 * k / 4)).mean())
    assert expected > 1.1
    for reading in chain.gauges.all()[:2]:
        assert reading.half_width < 0.03
        assert abs(reading.mean - expected) < 1.75 * reading.half_width


def test_intervals_cover() -> None:
    """95 % intervals of 200 tensors hold T; no alarm but at the rate promised."""
    count, d = 200, 4
    generator = torch.Generator().manual_seed(5)
    theta = torch.randn(count, d, generator=generator) / math.sqrt(N)
    params = [nn.Parameter(row) for row in theta]  # in one memory
    k = torch.linspace(0.5, 2.0, d)
    sampler = sg.HMC(
        params, 0.03, num_steps=4, num_data=N, prior_precision=PRIOR, seed=3
    )
    gauges = sg.Gauges(sampler, every=1)

    def closure() -> Tensor:
        for p, grad in zip(params, k * theta, strict=True):
            p.grad = grad
        return (k * theta.double().square()).sum() / 2

    for i in range(450):
        sampler.step(closure)
        if i == 50:
            gauges.reset()
    assert 0.6 < sampler.acceptance_rate < 0.99
    covered = np.zeros(3)
    for i in range(count):
        kinetic, configurational, excess, *_ = gauges.tensor(i)
        known = ((kinetic, 1.0), (configurational, 1.0), (excess, 0.0))
        covered += [abs(r.mean - value) < r.half_width for r, value in known]
    assert (covered >= 0.9 * count).all() and (covered < 0.99 * count).all(), covered
    assert gauges.findings(rate=0.05) == []


def _told(name: str, **numbers: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """An operator that is told other numbers than the sampler's."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        operator = getattr(hmc_module, name)
        monkeypatch.setattr(
            hmc_module, name, lambda *args, **given: operator(*args, **given | numbers)
        )

    return patch


def _prior_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hmc_leapfrog_", "hmc_energy"):
        _told(name, prior_precision=0.0)(monkeypatch)


def _no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hmc_module, "hmc_momenta_", lambda *args, **given: None)


def _draw_without_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = hmc_module.hmc_momenta_
    monkeypatch.setattr(
        hmc_module,
        "hmc_momenta_",
        lambda momenta, _, **given: draw(momenta, [], **given),
    )


def _accept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hmc_module, "metropolis_decide", lambda ratios, **given: ratios == ratios
    )


def _full_first_kick(monkeypatch: pytest.MonkeyPatch) -> None:
    leapfrog = hmc_module.hmc_leapfrog_

    def full(*args: Any, kick: float, drift: float, **given: Any) -> None:
        leapfrog(*args, kick=max(kick, drift), drift=drift, **given)

    monkeypatch.setattr(hmc_module, "hmc_leapfrog_", full)


TEST: Settings = {"step_size": 0.05, "num_steps": 5}
NO_TEST: Settings = {"step_size": 0.02, "num_steps": 5, "metropolis": False}
WRONG: dict[str, tuple[Settings, Any, Settings, str]] = {
    "prior dropped": (TEST, _prior_dropped, {}, "not in equilibrium"),
    "momenta not drawn": (TEST, _no_draw, {}, "cold"),
    "momenta twice as hot": (
        TEST,
        _told("hmc_momenta_", temperature=2.0),
        {},
        "hot",
    ),
    "momenta without the mass": (
        {"step_size": 0.45, "num_steps": 4, "mass": True},
        _draw_without_mass,
        {},
        "cold",
    ),
    "every end accepted": (
        {**TEST, "step_size": 0.08},
        _accept_all,
        {},
        "not in equilibrium",
    ),
    "gradient of half the scale": (TEST, None, {"gradient": 0.5}, "not in equilibrium"),
    "loss of twice the scale": (TEST, None, {"loss": 2.0}, "not in equilibrium"),
    "without the test: prior dropped": (
        NO_TEST,
        _prior_dropped,
        {},
        "not in equilibrium",
    ),
    "without the test: momenta not drawn": (NO_TEST, _no_draw, {}, "cold"),
    "without the test: first kick whole": (
        NO_TEST,
        _full_first_kick,
        {},
        "not in equilibrium",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_known_bugs_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1,000 trajectories of a small problem."""
    settings, patch, wrong, fault = WRONG[name]
    if patch is not None:
        patch(monkeypatch)
    chain = Chain(settings, **wrong)
    chain.run(100)
    chain.gauges.reset()
    for _ in range(10):
        chain.run(100)
        # Ten looks, at one's rate of false alarms.
        if fault in {found.fault for found in chain.gauges.findings(rate=0.001)}:
            return
    raise AssertionError(chain.gauges.summary())


@pytest.mark.quick
def test_observe_compares_the_gradients_of_trajectories_starts() -> None:
    """Clipped gradients are seen; right ones are not."""
    for gradient, faults in ((1.0, set()), (0.7, {"biased gradient"})):
        chain = Chain({**TEST, "metropolis": False}, gradient=gradient)

        def right(chain: Chain = chain) -> None:
            chain.p.grad = CURVATURES * chain.p.detach()

        for _ in range(200):
            chain.gauges.observe(right)
            chain.sampler.step(chain.closure)
        assert chain.faults & {"biased gradient"} == faults


@pytest.mark.quick
@pytest.mark.parametrize("name", RIGHT)
def test_gauges_change_no_bit_of_the_chain(name: str) -> None:
    observed, alone = (Chain(*RIGHT[name][:2]) for _ in range(2))
    alone.gauges.detach()
    for chain in (observed, alone):
        chain.run(30)
    assert torch.equal(observed.p, alone.p)
    assert observed.gauges.num_observed > 6
    a, b = (chain.sampler.state_dict() for chain in (observed, alone))
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key in a["state"].get(0, {}):
        assert torch.equal(a["state"][0][key], b["state"][0][key])


@pytest.mark.quick
def test_what_failed_and_what_is_in_between_is_not_observed() -> None:
    chain = Chain(TEST)
    chain.run(4)  # 0 and 3 are looked at
    assert chain.gauges.num_observed == 2
    calls = 0

    def failing() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError
        return chain.closure()

    chain.run(2)
    with pytest.raises(ArithmeticError):
        chain.sampler.step(failing)
    assert chain.gauges.num_observed == 2
    chain.run(1)
    assert chain.gauges.num_observed == 3
