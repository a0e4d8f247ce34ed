"""EWSG's transition, stationary law and weights against their closed forms.

The paper's theorem 2, and bugs that must be caught. Exact gradients leave SGHMC's
law, and are tested with all samplers in ``test_sampling_law.py``. False alarms: see the
note in ``harness.statistics``.
"""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from harness import index_chain
from harness.index_chain import check_transition
from harness.statistics import StatisticalError, check_mean, check_z
from levels import at_levels

import torch_sgmcmc as sg
from torch_sgmcmc.core import ops as ops

pytestmark = pytest.mark.full

SURROGATES = ("momentum", "zero", "one", "full_momentum")


def ewsg(groups, **settings):
    return sg.EWSG(groups, num_chains=len(groups[0]["params"][0]), **settings)


def posterior(**settings):
    """A conjugate posterior N = 4, d = 1; the weights matter much."""
    data = np.array([[-1.2], [0.1], [0.7], [1.9]])
    shared = {
        **{"lr": 0.3, "momentum": 0.6, "num_data": 4, "prior_precision": 1.0},
        **{"temperature": 1.5, "index_chain_length": 1},
    }
    return index_chain.Problem(data, ewsg, {**shared, **settings}, seed=5)


def transition(build=ewsg, **settings):
    """Two tensors in two groups that differ in everything, five minibatches."""
    data = np.array([[-1.2, 0.3], [0.1, -1.0], [0.7, 0.9], [1.9, 0.2], [-0.3, -0.5]])
    shared = {
        **{"lr": 0.3, "momentum": 0.6, "num_data": 5, "prior_precision": 2.0},
        **{"temperature": 0.8, "index_chain_length": 2},
    }
    other = {"lr": 0.2, "momentum": 0.7, "num_data": 7, "prior_precision": 0.0}
    sizes = {"other": {**other, "temperature": 1.3}, "chains": 200_000, "seed": 6}
    return index_chain.Problem(data, build, {**shared, **settings}, **sizes)


def check_posterior(problem, reach=6.5):
    index_chain.check_posterior(problem, reach=reach, steps=60)


HERE = np.array([0.4, -0.6])
MOVING = np.array([0.3, 0.2])


LENGTHS = [(0, "momentum"), (1, "momentum"), (5, "one"), *product([2], SURROGATES)]


@pytest.mark.parametrize(
    ("length", "surrogate"),
    at_levels(LENGTHS, default=[(2, "momentum")], otherwise="full"),
)
def test_transition(length, surrogate):
    problem = transition(index_chain_length=length, surrogate=surrogate)
    check_transition(problem, HERE, MOVING)


@pytest.mark.parametrize(
    "mistake",
    at_levels(
        [{"surrogate": "zero"}, {"index_chain_length": 1}],
        default=[{"surrogate": "zero"}],
        otherwise="full",
    ),
)
def test_wrong_weights_are_caught(mistake):
    problem = transition(lambda groups, **settings: ewsg(groups, **settings | mistake))
    with pytest.raises(StatisticalError):
        check_transition(problem, HERE, MOVING)


def test_overdamped_transition():
    problem = transition(momentum=0.0, surrogate="zero")
    problem = replace(problem, other={**problem.other, "momentum": 0.0})
    check_transition(problem, HERE, np.zeros(2))
    # With no momentum carried over, v = 0: the surrogates of the momentum agree.
    for surrogate in ("momentum", "full_momentum"):
        same = index_chain.with_settings(problem, surrogate=surrogate)
        check_transition(same, HERE, np.zeros(2))


OVERDAMPED = {"momentum": 0.0, "surrogate": "zero", "lr": 0.2}
SETTINGS = [
    *({"surrogate": name} for name in SURROGATES),
    *({"index_chain_length": 0}, {"index_chain_length": 4}, OVERDAMPED),
]


@pytest.mark.parametrize(
    "settings",
    at_levels(SETTINGS, full=[{"surrogate": "momentum"}, OVERDAMPED]),
    ids=str,
)
def test_posterior_by_minibatches(settings):
    check_posterior(posterior(**settings))


def test_ewsg_is_closer_to_the_posterior_than_sghmc():
    """The weights remove most of the minibatches' noise."""
    n, temperature = 4, 1.5
    exact = temperature / (n + 1.0)
    lr, m = 0.3, 0.6
    # Of the discretised chain with the full gradient, curvature 1 + λ / N.
    full = exact / (1 - lr * (1 + 1 / n) / 2 / (1 + m))
    errors = []
    for length in (0, 1, 2):
        problem = posterior(index_chain_length=length)
        law = index_chain.stationary_law(problem, reach=6.5)
        errors.append(law.moment(2, law.moment(1)) - full)
    assert errors[0] > 2.5 * errors[1] > 5 * errors[2] > 0


def persistent(**settings):
    problem = posterior(persistent_index_chain=True, **settings)
    return replace(problem, chains=30_000)


def test_posterior_by_a_persistent_index_chain():
    check_posterior(persistent())


@pytest.mark.nightly
def test_overdamped_posterior_by_a_persistent_index_chain():
    check_posterior(persistent(**OVERDAMPED), reach=5.0)


@pytest.mark.parametrize("length", [1, 3])
def test_indices_of_consecutive_steps_of_a_persistent_index_chain(length):
    index_chain.check_consecutive(ewsg, length, persistent=True)


TARGET = {
    **{"lr": 0.3, "momentum": 0.6, "num_data": 6.0, "prior_precision": 2.5},
    **{"temperature": 0.7},
}
NOISE = 2 * 0.4 * 0.3 * 0.7 / 6


class Theorem2:
    """Six minibatches at one point, and new momenta v' to look at."""

    def __init__(self, count):
        g = torch.Generator().manual_seed(3)
        self.theta = torch.tensor([0.4, -0.6, 0.2], dtype=torch.float64)
        self.v = torch.tensor([0.1, 0.2, -0.1], dtype=torch.float64)
        grads = 0.5 + 0.3 * torch.randn(6, 3, generator=g, dtype=torch.float64)
        self.grads, self.full = grads, grads.mean(dim=0)
        self.count, self.generator = count, g

    def mean(self, grad):
        decay = TARGET["prior_precision"] / TARGET["num_data"]
        pull = grad + decay * self.theta
        return TARGET["momentum"] * self.v - TARGET["lr"] * pull

    def log_weights(self, new, index):
        """W(gᵢ) - W(full gradient) at the true surrogate u = v' - (1 - α) v."""
        u = new - TARGET["momentum"] * self.v
        theta, base = (
            t.expand(self.count, 3).contiguous() for t in (self.theta, self.full)
        )
        lists = ([theta], [base], [self.grads[index]], [u / (1 - TARGET["momentum"])])
        settings = {**TARGET, "surrogate": 0, "num_chains": self.count}
        return ops.ewsg_log_ratio(*lists, **settings)

    def check_identity(self):
        """Each minibatch's density times its weight is the full gradient's density."""
        new = torch.randn(self.count, 3, generator=self.generator, dtype=torch.float64)
        for i in range(6):
            density = -(new - self.mean(self.grads[i])).square().sum(1) / (2 * NOISE)
            wanted = -(new - self.mean(self.full)).square().sum(1) / (2 * NOISE)
            found = density + self.log_weights(new, torch.full((self.count,), i))
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)

    def check_transition(self):
        """Transitions by minibatches, weighted, follow the full gradient's kernel."""
        index = torch.randint(6, (self.count,), generator=self.generator)
        start = self.theta.expand(self.count, 3).contiguous()
        theta, v = start.clone(), self.v.expand(self.count, 3).clone()
        lists = [theta], [self.grads[index]], [v], [], []
        settings = {"noise_estimate": 0.0, "resample_momentum_every": 0, **TARGET}
        ops.sghmc_step_(*lists, **settings, offsets=[0], seed=8, step=0)
        weights = self.log_weights(v, index).exp().numpy()
        z = ((v - self.mean(self.full)) / NOISE**0.5).numpy()
        d = 3
        second = [z[:, i] * z[:, j] for i in range(d) for j in range(i + 1)]
        eye = [float(i == j) for i in range(d) for j in range(i + 1)]
        third = [z[:, i] ** 3 for i in range(d)]
        fourth = [z[:, i] ** 4 for i in range(d)]
        features = np.column_stack([z, *second, *third, *fourth])
        expected = np.array([*[0.0] * d, *eye, *[0.0] * d, *[3.0] * d])
        check_mean(weights[:, None] * features, expected, label="theorem 2")


def test_exact_weights_turn_the_kernel_into_the_full_gradients():
    Theorem2(1000).check_identity()
    Theorem2(400_000).check_transition()


def test_the_index_law_converges_to_the_weights():
    problem = transition()
    w = problem.log_weights(HERE, MOVING)
    exact = index_chain.exact_weights(w)
    laws = (index_chain.index_law(w, length) for length in range(60))
    distances = [0.5 * np.abs(law - exact).sum() for law in laws]
    assert distances[0] > 0.3
    assert all(b < a for a, b in pairwise(distances))
    assert distances[-1] < 1e-4
    # Detailed balance: the weights are stationary.
    move = np.exp(np.minimum(w[None] - w[:, None], 0)) / len(w)
    np.testing.assert_allclose(exact[:, None] * move, (exact[:, None] * move).T)


@pytest.mark.parametrize("length", at_levels([0, 1, 3, 40], full=[0, 1, 3]))
def test_indices_of_consecutive_steps(length):
    """The used minibatch: after M proposals, fresh in each step."""
    index_chain.check_consecutive(ewsg, length)


def test_acceptance_rate_follows_the_weights():
    problem = transition(index_chain_length=1)
    w = problem.log_weights(HERE, MOVING)
    expected = np.minimum(np.exp(w[None] - w[:, None]), 1).mean()
    run = index_chain.Run(problem, HERE, MOVING)
    run.advance(1)
    n = problem.chains
    error = (expected * (1 - expected) / n) ** 0.5
    z = (run.sampler.acceptance_rate - expected) / error
    check_z({"acceptance": z}, label="acceptance rate")
