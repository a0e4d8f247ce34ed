"""HMC-ECS does not leave the posterior without a word.

Logistic regressions started at the parameters that made the data. Where |L̂| or the
perturbed estimate is larger far away than anywhere in the posterior, one long step of a
warm-up is enough; see the note in ``csrc/ops/hmc_ecs.cpp``. False
alarms: see the note in ``harness.statistics``.
"""

import math
from unittest import mock

import pytest
import torch
from harness.statistics import check_p
from levels import at_levels
from scipy import stats

import torch_sgmcmc as sg
from torch_sgmcmc.samplers._ecs.target import Estimator

# Warm-ups choose few factors here.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:num_blocks")]

D = 2
SEEDS = range(6)


class Regression:
    """A chain of its own data; 2 U above its minimum is nearly χ²(d) at a draw."""

    def __init__(self, seed, n=400, **settings):
        g = torch.Generator().manual_seed(seed)
        like = {"generator": g, "dtype": torch.float64}
        self.x = torch.randn(n, D, **like)
        self.theta = torch.linspace(1, -1, D, dtype=torch.float64).requires_grad_()
        self.y = (torch.rand(n, **like) < (self.x @ self.theta).sigmoid()).double()
        settings = {"num_blocks": 10, **settings}
        self.sampler = sg.HMCECS([self.theta], num_data=n, seed=seed, **settings)

    def __call__(self, indices):
        eta = self.x[indices] @ self.theta
        return self.y[indices] * eta - torch.nn.functional.softplus(eta)

    def potential(self, theta):
        eta = self.x @ theta
        return (torch.nn.functional.softplus(eta) - self.y * eta).sum()

    def minimum(self):
        theta = torch.zeros(D, dtype=torch.float64)
        for _ in range(20):
            slope = torch.func.grad(self.potential)(theta)
            hessian = torch.func.hessian(self.potential)(theta)
            theta -= torch.linalg.solve(hessian, slope)
        return self.potential(theta)

    def run(self, draws=30):
        """2 U above its minimum, at the last draw after the warm-up."""
        self.sampler.warmup(self, 150, anchor_every=25, progress=False)
        for _ in range(draws):
            self.sampler.step(self)
        return 2 * float(self.potential(self.theta.detach()) - self.minimum())


def check_draws(heights):
    """Checks that draws of independent chains are of the posterior."""
    each = stats.chi2(D).sf(heights)
    p = {str(i): float(value) for i, value in enumerate(each)}
    total = float(stats.chi2(D * len(heights)).sf(sum(heights)))
    check_p({**p, "all": total}, label="heights of draws")


def without_bound():
    """The likelihood is 0 beyond a."""
    never = lambda self, mean: False  # noqa: E731
    return mock.patch.object(Estimator, "has_unreliable_sign", never)


SIGNED = {"estimator": "signed", "subsample_size": 10, "taylor_order": 1}
# Of so few data that most are never in the estimate of the variance.
PERTURBED = {"n": 100, "subsample_size": 3, "taylor_order": 1}
SIZES = {"subsample_size": 40}
LEFT = (
    "has left the posterior: the log posterior of all data is .* below its value at θ"
)


@pytest.mark.parametrize(("m", "order"), at_levels([(10, 1), (40, 2)], full=[(10, 1)]))
def test_the_signed_sampler_stays(m, order):
    settings = {**SIGNED, "subsample_size": m, "taylor_order": order}
    check_draws([Regression(seed, **settings).run() for seed in SEEDS])


@pytest.mark.parametrize("settings", [SIGNED, PERTURBED])
def test_a_warmup_that_leaves_raises(settings):
    regression = Regression(3, **settings)
    with without_bound(), pytest.raises(RuntimeError, match=LEFT):
        regression.run()
    with pytest.raises(RuntimeError, match="a warm-up has not ended"):
        regression.sampler.state_dict()


def test_a_start_beyond_the_bound():
    regression = Regression(0, **SIGNED)
    regression.sampler.step(regression)
    with torch.no_grad():
        regression.theta += 3
    start = regression.theta.detach().clone()
    with pytest.raises(RuntimeError, match=r"is -\d+\.?\d* \(must be > a = -100: bey"):
        regression.sampler.step(regression)
    assert torch.equal(regression.theta, start)
    regression.sampler.set_anchor(regression, progress=False)
    regression.sampler.step(regression)


def test_few_factors_have_no_bound():
    """The law of few is tested where all of them may be negative."""
    regression = Regression(0, **SIGNED, num_factors=9)
    regression.sampler.step(regression)
    with torch.no_grad():
        regression.theta += 3
    regression.sampler.step(regression)


@pytest.mark.parametrize("estimator", ["perturbed", "signed"])
def test_some_steps_use_all_data(estimator):
    settings = {**SIZES, "estimator": estimator, "num_factors": 5}
    regression = Regression(0, **settings)
    passes = 0

    def closure(indices):
        nonlocal passes
        passes += torch.equal(indices, torch.arange(400))
        return regression(indices)

    sampler = regression.sampler
    sampler.set_anchor(closure, progress=False)
    for _ in range(60):
        sampler.step(closure)
    # Ten passes' worth of evaluations after the last.
    cost = {"perturbed": 40 * 7, "signed": 5 * 40 * 7}[estimator]
    assert passes == 1 + 59 // math.ceil(4000 / cost)
    # As if the chain had left.
    sampler.state["control_variates"]["value"] += 1000
    with pytest.raises(RuntimeError, match=LEFT):
        for _ in range(60):
            sampler.step(closure)
    theta = regression.theta.detach().clone()
    with pytest.raises(RuntimeError, match=LEFT):
        sampler.step(closure)
    assert torch.equal(regression.theta, theta)
