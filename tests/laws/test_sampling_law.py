"""Every sampler follows the exact law of its discretised chain, on every target."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import chains as checks
from harness import suite, targets
from harness.methods import METHODS, THERMOSTATS, Law, Method
from harness.statistics import (
    AffineMap,
    StatisticalError,
    check_gaussian,
    kick,
    move,
)
from levels import at_levels

import torch_sgmcmc as sg
from torch_sgmcmc import PSGLD, SGNHT

pytestmark = pytest.mark.full

every_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
SGHMC = next(m for m in METHODS if m.name == "SGHMC")
ADAPTING = Method("PSGLD", PSGLD, lambda *_: None, lambda *_: None)


@pytest.mark.parametrize(
    ("name", "experiment"),
    at_levels(
        [
            (method.name, experiment)
            for experiment in suite.EXPERIMENTS
            for method in METHODS
            if not (method.chooses and experiment in suite.NOISY)
        ],
        default=[(method.name, "all at once") for method in METHODS],
        otherwise="full",
    ),
)
def test_gaussian_targets(name, experiment):
    (method,) = (each for each in METHODS if each.name == name)
    checks.check_stationary(suite.EXPERIMENTS[experiment](method))
    checks.check_transient(suite.EXPERIMENTS[experiment](method))


def too_hot(method, factor=1.04):
    """Returns the method with noise that is too large: by 2 %."""

    def build(params, **settings):
        temperature = factor * settings.get("temperature", 1.0)
        return method.build(params, **{**settings, "temperature": temperature})

    return replace(method, build=build)


@pytest.mark.default
@every_method
def test_noise_2_percent_too_large_is_caught(method):
    checks.assert_caught(checks.check_stationary, suite.all_at_once(too_hot(method)))


@pytest.mark.parametrize("experiment", suite.EXPERIMENTS)
def test_no_experiment_is_blind(experiment):
    wrong = suite.EXPERIMENTS[experiment](too_hot(SGHMC))
    checks.assert_caught(checks.check_stationary, wrong)
    if experiment == "all at once":
        checks.assert_caught(checks.check_transient, wrong)


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m.inertia], ids=lambda m: m.name
)
def test_double_well(method):
    checks.check_double_well(suite.double_well(method))


def test_double_well_sees_a_bug():
    wrong = suite.double_well(too_hot(SGHMC, factor=1.5))
    checks.assert_caught(checks.check_double_well, wrong)


@every_method
def test_law_tends_to_the_posterior(method):
    """N(…, T (N H + λ)⁻¹) up to O(lr), whatever the momentum."""
    errors = []
    for lr in (0.002, 0.001):
        experiment = suite.all_at_once(method, lr=lr)
        mean, cov = (m[..., :4] for m in experiment.law.cycle.stationary())
        hessian = experiment.target.hessian
        precision = 20 * hessian + 8.0 * np.eye(4)
        posterior = 0.6 * np.linalg.inv(precision)
        centre = np.linalg.solve(precision, 20 * hessian @ experiment.target.centre)
        np.testing.assert_allclose(mean[:4], centre, rtol=1e-9)
        errors.append(np.abs(cov[:4] - posterior).max() / posterior.max())
    assert errors[1] < 0.004
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.02)


def test_momentum_drawn_afresh():
    checks.check_stationary(suite.resampled(SGHMC))
    checks.check_transient(suite.resampled(SGHMC))


def test_momentum_is_stationary_from_the_start():
    """v ~ N(0, lr T / N), which is stationary up to 1 / (1 - α/2) and O(lr)."""
    scale = 1e-5 * 0.6 / 20
    experiment = suite.all_at_once(SGHMC, lr=1e-5, momentum=0.98)
    np.testing.assert_allclose(experiment.law.start[4:, 4:], scale * np.eye(4))
    _, cov = experiment.law.cycle.stationary()
    expected = scale / (1 - 0.02 / 2) * np.eye(4)
    np.testing.assert_allclose(cov[4:, 4:], expected, atol=1e-3 * scale)
    # With next to no friction and gradient, one update shows the first draw itself.
    frozen = suite.all_at_once(SGHMC, lr=1e-9, momentum=1 - 1e-9)
    chains = checks.Chains(replace(frozen, dtype=torch.float64), np.zeros(4))
    chains.advance(1)
    momentum = chains.state(["momentum"], theta=False)
    check_gaussian(momentum / (1e-9 * 0.6 / 20) ** 0.5, label="first momentum")


@pytest.mark.default
def test_noise_account():  # BAOA's: test_baoa_law.py
    checks.check_stationary(suite.accounted(SGHMC))
    checks.check_transient(suite.accounted(SGHMC))


def test_noise_account_online():
    """Two coordinates of very different noise get back the variance 1 each.

    Half the mean squared difference of consecutive gradients estimates
    V (1 + lr h) + h² E[v²] / 2 on a curvature h: the gradient moves with θ, and v
    holds a part lr of the noise of the gradient before. The law follows from what is
    estimated; that the estimates fluctuate by 5 % adds 1e-3 to the kurtosis.
    """
    noise = np.diag([1.0, 0.05])
    lr = 0.05
    target = targets.Quadratic(np.eye(2), np.zeros(2), noise)
    settings = {"lr": lr, "momentum": 0.9, "num_data": 1, "noise_estimate": "online"}
    experiment = checks.Experiment(SGHMC, target, settings, chains=20_000, seed=71)
    without = {**experiment.coordinates, "noise_estimate": np.zeros(2)}
    _, cov = SGHMC.law(experiment.target, without).cycle.stationary()
    assert cov[0, 0] > 1.25

    estimated = np.diag(noise)
    for _ in range(20):  # the estimate depends on the law and the law on it
        account = {**without, "noise_estimate": lr * estimated / 2}
        _, cov = SGHMC.law(experiment.target, account).cycle.stationary()
        estimated = np.diag(noise) * (1 + lr) + np.diag(cov)[2:] / 2
    np.testing.assert_allclose(np.diag(cov)[:2], 1, atol=0.03)

    chains = checks.Chains(experiment, np.zeros(2))
    chains.advance(1500)
    variances = chains.state(["grad_variance"], theta=False).mean(axis=0)
    np.testing.assert_allclose(variances, estimated, rtol=0.005)
    check_gaussian(chains.state(["momentum"]), cov=cov, label="online account")


@pytest.mark.default
@pytest.mark.parametrize("gamma", [True, False], ids=["gamma", "plain"])
def test_preconditioner_without_memory(gamma):
    checks.check_memoryless(suite.memoryless(ADAPTING, gamma=gamma))


def test_a_missing_gamma_is_caught():
    wrong = replace(ADAPTING, build=lambda p, **s: PSGLD(p, **s | {"gamma": False}))
    checks.assert_caught(checks.check_memoryless, suite.memoryless(wrong, gamma=True))


def test_gamma_from_the_first_step_on():
    checks.check_start(suite.started(ADAPTING))


@pytest.mark.parametrize("name", ["normal", "skewed"])
def test_gamma_with_a_memory(name):
    make = getattr(suite, name)
    mean, variance = 0.0, 1.0
    if name == "skewed":
        mean, variance = targets.LogGamma.mean, targets.LogGamma.variance
    moments = np.array([mean, variance + mean**2])
    checks.check_extrapolated(make(ADAPTING, **suite.FELT_GAMMA), moments, time=12)
    without = make(ADAPTING, gamma=False, **suite.FELT_GAMMA)
    with pytest.raises(StatisticalError):
        checks.check_extrapolated(replace(without, chains=5000), moments, time=12)


def test_frozen_preconditioner_may_come_from_adaptation():
    """Burn-in with adaptation and no Γ, then V stays and the target is right.

    The law given V is that of SGLD with a step size of its own for every chain, so that
    each is whitened by its own deviation.
    """
    experiment = suite.normal(ADAPTING, lr=0.05, decay=0.9, gamma=False)
    chains = checks.Chains(experiment, np.zeros(1))
    chains.advance(200)
    chains.sampler.param_groups[0]["adapt"] = False
    v = chains.state(["square_average"], theta=False)
    chains.advance(600)
    assert np.array_equal(chains.state(["square_average"], theta=False), v)
    step = 0.05 / (np.sqrt(v) + 1.0)
    assert step.std() > 0.1 * step.mean()
    check_gaussian(chains.state() * np.sqrt(1 - step / 2), label="after adaptation")


STEP, DATA, PRIOR = 0.08, 20.0, 2.0
#: M, C and B̂ of each param group.
SCALARS = {
    1: {"mass": 0.8, "friction": 2.0, "estimate": 1.0},
    2: {"mass": 2.5, "friction": 10.0, "estimate": 5.0},
}


def algorithm_2_law(target, _):
    """r <- r - ε ∇Ũ - ε C M⁻¹ r + N(0, 2 ε (C - B̂)), then θ <- θ + ε M⁻¹ r.

    The paper moves θ first: the same chain half a step later. v is ε M⁻¹ r.
    """
    mass, friction, estimate = (
        np.concatenate([np.full(width, each[key]) for width, each in SCALARS.items()])
        for key in ("mass", "friction", "estimate")
    )
    d = target.dimension
    hessian = DATA * target.hessian
    noise = np.diag(2 * STEP * (friction - estimate))
    noise = noise + (STEP * DATA) ** 2 * target.noise
    pull = STEP * (hessian + PRIOR * np.eye(d))
    shift = STEP * hessian @ target.centre
    step = kick(pull, shift, 1 - STEP * friction / mass, noise).then(move(STEP / mass))
    to_v = np.diag(np.concatenate([np.ones(d), STEP / mass]))
    back = np.linalg.inv(to_v)
    cycle = AffineMap(to_v @ step.a @ back, to_v @ step.b, to_v @ step.q @ to_v)
    start = np.diag(np.concatenate([np.zeros(d), mass]))
    return Law(cycle, to_v @ start @ to_v, state=("momentum",))


def algorithm_2():
    """SGHMC with the hyperparameters that docs/samplers/sghmc.md says."""
    groups = []
    for width, own in SCALARS.items():
        mass, friction, estimate = own.values()
        settings = {
            "lr": STEP**2 * DATA / mass,
            "momentum": 1 - STEP * friction / mass,
            "noise_estimate": STEP * estimate / mass,
        }
        groups.append(checks.Group((width,), settings))
    # B̂ = ε V̂ / 2, V̂ = N² Var(ḡ)
    estimates = [each["estimate"] for w, each in SCALARS.items() for _ in range(w)]
    noise = 2 * np.diag(estimates) / (STEP * DATA**2)
    hessian = targets.correlated(3, seed=5, condition=3.0)
    target = targets.Quadratic(hessian, np.array([1.0, -1.0, 0.5]), noise)
    method = Method("algorithm 2", sg.SGHMC, algorithm_2_law, lambda _: (0.0, 0.0))
    common = {"lr": 0.1, "num_data": DATA, "prior_precision": PRIOR}
    return checks.Experiment(method, target, common, tuple(groups), seed=12)


def test_mass_friction_and_estimate_of_each_group():
    checks.check_stationary(algorithm_2())
    checks.check_transient(algorithm_2())


@pytest.mark.default
def test_thermostats_absorb_gradient_noise():
    checks.check_thermostats(suite.absorbed(THERMOSTATS))


def test_a_wrong_temperature_of_thermostats_is_caught():
    wrong = suite.absorbed(too_hot(THERMOSTATS))
    checks.assert_caught(checks.check_thermostats, wrong)


def test_thermostat_rate_by_default():
    """None is lr T / N: the same chain to the last bit."""
    experiment = replace(suite.absorbed(THERMOSTATS), chains=10)
    rates = {}
    for rate in (None, 0.1 * 0.6 / 20):
        settings = {**experiment.settings, "thermostat_rate": rate}
        chains = checks.Chains(replace(experiment, settings=settings), np.zeros(3))
        chains.advance(5)
        assert isinstance(chains.sampler, SGNHT)
        rates[rate] = chains.state(["thermostat"])
    first, second = rates.values()
    assert np.array_equal(first, second)


@pytest.mark.default
@pytest.mark.parametrize("settings", [{"gamma": False}, {"adapt": False}, {}])
@pytest.mark.parametrize("lr", [1e-3, 1e-2, 1.0])
def test_psgld_samples_the_prior_where_gradients_are_0(lr, settings):
    """Unused tokens and dead units follow an AR(1) chain with a bounded coefficient.

    20,000 coordinates: the error of a variance is 1 %, and the bound's mutant (none, as
    G = 1 / eps) has 1.33 of it at lr 1e-3 and diverges at the others.
    """
    p = torch.zeros(20_000, dtype=torch.float64, requires_grad=True)
    sampler = PSGLD([p], lr, num_data=200, prior_precision=1.0, seed=3, **settings)
    for _ in range(60):
        # A graph for Γ, of second derivatives that are 0.
        p.grad = (p**2 * 0.0) if not settings else torch.zeros_like(p)
        sampler.step()
    coefficient = min(lr / 200 / 1e-5, 0.1)
    variance = 1 / (1 - coefficient / 2)
    left = (1 - coefficient) ** 120  # of the start at 0
    expected = variance * (1 - left)
    assert float(p.detach().var()) == pytest.approx(expected, rel=0.04)
