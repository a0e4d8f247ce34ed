"""EWSG's transition, stationary law and weights against their closed forms.

And wrong weights, which must be caught. Exact gradients leave SGHMC's
law, and are tested with all samplers in ``test_sampling_law.py``. False alarms: see the
note in ``harness.statistics``.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from harness import index_chain
from harness.index_chain import check_transition
from harness.statistics import StatisticalError
from levels import at_levels

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

SURROGATES = ("momentum", "zero", "one", "full_momentum")


def ewsg(groups, **settings):
    return sg.EWSG(groups, num_chains=len(groups[0]["params"][0]), **settings)


def posterior(**settings):
    """A conjugate posterior N = 4, d = 1; the weights matter much."""
    data = np.array([[-1.2], [0.1], [0.7], [1.9]])
    shared = {
        "lr": 0.3,
        "momentum": 0.6,
        "num_data": 4,
        "prior_precision": 1.0,
        "temperature": 1.5,
        "index_chain_length": 1,
    }
    return index_chain.Problem(data, ewsg, {**shared, **settings}, seed=5)


def transition(build=ewsg, **settings):
    """Two tensors in two groups that differ in everything, five minibatches."""
    data = np.array([[-1.2, 0.3], [0.1, -1.0], [0.7, 0.9], [1.9, 0.2], [-0.3, -0.5]])
    shared = {
        "lr": 0.3,
        "momentum": 0.6,
        "num_data": 5,
        "prior_precision": 2.0,
        "temperature": 0.8,
        "index_chain_length": 2,
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
    {"index_chain_length": 0},
    {"index_chain_length": 4},
    OVERDAMPED,
]


@pytest.mark.parametrize(
    "settings",
    at_levels(SETTINGS, full=[{"surrogate": "momentum"}, OVERDAMPED]),
    ids=str,
)
def test_posterior_by_minibatches(settings):
    check_posterior(posterior(**settings))


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


@pytest.mark.parametrize("length", at_levels([0, 1, 3, 40], full=[0, 1, 3]))
def test_indices_of_consecutive_steps(length):
    """The used minibatch: after M proposals, fresh in each step."""
    index_chain.check_consecutive(ewsg, length)
