"""SGLRW: the exact law of its lattice, its words, and what its monitor read."""

import math

import numpy as np
import pytest
import torch
from harness.philox import philox
from harness.statistics import StatisticalError, check_counts, check_z
from torch import nn

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

CHAINS = 200_000
# Of a mean loss (θ - CENTRE)² / 2 by minibatches whose gradients are NOISE off, up or
# down as often.
CENTRE, START = -0.4, 0.6
TARGET = {
    "lr": 0.3,
    "num_data": 20.0,
    "prior_precision": 3.0,
    "prior_mean": 0.5,
    "temperature": 0.7,
}


class Lattice:
    """The chain as a walk on START + δ k, k from -reach to reach."""

    def __init__(self, reach, noise, lr=TARGET["lr"]):
        pull = TARGET["prior_precision"] / TARGET["num_data"]
        heat = TARGET["temperature"] / TARGET["num_data"]
        self.reach, self.heat = reach, heat
        self.delta = math.sqrt(2 * lr * heat)
        self.theta = START + self.delta * np.arange(-reach, reach + 1)
        exact = self.theta - CENTRE + pull * (self.theta - TARGET["prior_mean"])
        self.grads = np.stack([exact - noise, exact + noise])
        self.kept = np.clip(self.grads, -self.delta / lr, self.delta / lr)
        self.up = (0.5 * (1 - lr * self.kept / self.delta)).mean(axis=0)

    def after(self, steps):
        """The law of the place after so many steps from START."""
        law = np.zeros(2 * self.reach + 1)
        law[self.reach] = 1
        for _ in range(steps):
            ups, downs = law * self.up, law * (1 - self.up)
            law = np.concatenate([[0], ups[:-1]]) + np.concatenate([downs[1:], [0]])
        return law


def noisy(p, noise, generator):
    signs = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
    p.grad = p.detach() - CENTRE + noise * signs


@pytest.mark.default
@pytest.mark.parametrize(("steps", "noise"), [(8, 0.0), (40, 0.3)])
def test_every_place_is_as_likely_as_it_should_be(steps, noise):
    p = nn.Parameter(torch.full((CHAINS,), START, dtype=torch.float64))
    check_places(p, sg.SGLRW([p], **TARGET, seed=7), steps, noise)


def check_places(p, sampler, steps, noise):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        noisy(p, noise, g)
        sampler.step()
    lattice = Lattice(steps, noise)
    place = (p.detach().numpy() - START) / lattice.delta
    whole = np.rint(place)
    assert np.abs(place - whole).max() < 1e-9
    counts = np.bincount(whole.astype(int) + steps, minlength=2 * steps + 1)
    law = lattice.after(steps)
    assert not np.any(counts[law == 0])
    check_counts(counts[law > 0], law[law > 0], label="SGLRW's lattice")


@pytest.mark.default
def test_a_missing_prior_is_caught():
    p = nn.Parameter(torch.full((CHAINS,), START, dtype=torch.float64))
    sampler = sg.SGLRW([p], **TARGET | {"prior_precision": 0.0}, seed=7)
    # Of other probabilities, or where the law has none.
    with pytest.raises((StatisticalError, AssertionError)):
        check_places(p, sampler, 40, 0.3)


@pytest.mark.default
@pytest.mark.parametrize(
    ("numel", "dtype"), [(7, torch.float64), (1001, torch.float32)]
)
def test_directions_are_drawn_by_the_words(numel, dtype):
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(numel, generator=g, dtype=dtype))
    sampler = sg.SGLRW([p], **TARGET, seed=-11)
    for step in range(3):
        p.grad = torch.randn(numel, generator=g, dtype=dtype)
        pull = TARGET["prior_precision"] / TARGET["num_data"]
        force = p.grad.double() + pull * (p.detach().double() - TARGET["prior_mean"])
        before = p.detach().double().clone()
        sampler.step()
        quads = np.arange((numel + 3) // 4, dtype=np.uint64)
        counter = np.stack(
            [quads, 0 * quads, 0 * quads + np.uint64(step), 0 * quads], 1
        )
        key = -11 % 2**64
        words = philox(counter, (key % 2**32, key >> 32)).ravel()[:numel]
        u = (words.astype(np.uint32).view(np.int32) + 0.5) / 2**31
        delta = math.sqrt(2 * 0.3 * 0.7 / 20)
        gap = torch.from_numpy(delta * u) + 0.3 * force
        sure = gap.abs() > 1e-6
        assert sure.double().mean() > 0.99 or numel == 1
        expected = before + torch.where(gap < 0, delta, -delta)
        torch.testing.assert_close(
            p.detach().double()[sure], expected[sure], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_temperatures_show_clipping_alone(noise):
    p = nn.Parameter(torch.full((CHAINS,), START, dtype=torch.float64))
    sampler = sg.SGLRW([("theta", p)], **TARGET, seed=3)
    g = torch.Generator().manual_seed(2)
    burn_in, steps = 60, 40
    monitor = sg.TemperatureMonitor(sampler, every=1)
    for step in range(burn_in + steps):
        if step == burn_in:
            monitor.reset()
        noisy(p, noise, g)
        sampler.step()
    read = monitor.tensor("theta")
    lattice = Lattice(burn_in + steps, noise)
    laws = [lattice.after(n) for n in range(burn_in, burn_in + steps)]
    forces = lattice.theta * lattice.grads / lattice.heat * TARGET["temperature"]
    kept = lattice.theta * lattice.kept / lattice.heat * TARGET["temperature"]
    expected = {
        "configurational": forces,
        "kinetic": TARGET["temperature"] + forces - kept,
        "clipped": 1.0 * (lattice.grads != lattice.kept),
    }
    scores = {}
    for name, values in expected.items():
        means = [law @ values.mean(axis=0) for law in laws]
        square = np.mean([law @ (values**2).mean(axis=0) for law in laws])
        # No more than that of one step: steps are correlated.
        error = math.sqrt((square - np.mean(means) ** 2) / CHAINS)
        scores[name] = (getattr(read, name).mean - np.mean(means)) / error
    check_z(scores, label="SGLRW's monitor")
    assert abs(read.excess.mean) < 0.01 < read.clipped.mean
    (finding,) = monitor.issues() if noise else monitor.issues(budget=0.001)
    assert finding.fault == "above T"
    assert "is clipping, of" in monitor.summary(budget=0.001)


def test_temperatures_of_a_lattice_that_rests_or_arrives():
    """Steps with lr 0 are not read, and distant steps clip without lack of noise."""
    p = nn.Parameter(torch.full((1000,), 5.0))
    sampler = sg.SGLRW([("theta", p)], lr=0.0, num_data=100, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=1)
    for step in range(60):
        p.grad = p.detach() - 8
        sampler.step()
        if step == 29:
            assert math.isnan(monitor.all().kinetic.mean)
            sampler.param_groups[0]["lr"] = 0.01
    assert monitor.all().clipped.mean == 1
    assert {finding.fault for finding in monitor.issues()} >= {"below T"}
    summary = monitor.summary()
    assert "steps clip on the way outward" in summary and "  100 %" in summary
    assert "times as large within the budget" not in summary


def test_schedules_know_its_limits():
    p = nn.Parameter(torch.zeros(3))
    sampler = sg.SGLRW([p], lr=0.1, num_data=10, seed=0)
    with pytest.raises(ValueError, match=r"exploration: 0\.8 \(must be 0 with SGLRW"):
        sg.CyclicalSchedule(sampler, 4)
    assert "initial_lr" not in sampler.param_groups[0]
    for schedule in (
        sg.CyclicalSchedule(sampler, 4, exploration=0.0),
        sg.PolynomialDecay(sampler, b=2.0),
    ):
        for _ in range(6):
            p.grad = p.detach().clone()
            sampler.step()
            schedule.step()
    assert sampler.param_groups[0]["temperature"] == 1


def test_what_is_not_finite_is_not_walked_over():
    p = nn.Parameter(torch.zeros(5))
    sampler = sg.SGLRW([p], lr=0.1, num_data=10, nonfinite="ignore", seed=0)
    p.grad = torch.tensor([-1e30, math.nan, math.inf, -math.inf, 1e30])
    sampler.step()
    delta = math.sqrt(0.02)
    expected = torch.tensor([delta, math.nan, -math.inf, math.inf, -delta])
    torch.testing.assert_close(p.detach(), expected, equal_nan=True)
