"""Every sampler follows the exact law of its discretised chain, on every target."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import chains as checks
from harness import suite, targets
from harness.methods import METHODS, THERMOSTATS, Law, Method
from harness.preconditioned import memoryless_law, weighted_variance
from harness.statistics import AffineMap, StatisticalError, check_gaussian, check_z
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


@every_method
def test_double_well(method):
    checks.check_double_well(suite.double_well(method))


def test_double_well_sees_a_bug():
    wrong = suite.double_well(too_hot(SGHMC, factor=1.5))
    checks.assert_caught(checks.check_double_well, wrong)


def test_double_well_with_the_noise_accounted_for():
    """The paper's figure 1: with β̂, gradient noise N(0, 4) changes nothing."""
    noisy = suite.double_well(SGHMC, noisy=True)
    lr = noisy.settings["lr"]
    settings = {**noisy.settings, "noise_estimate": lr * 4 / 2}
    accounted = replace(noisy, settings=settings)
    checks.check_double_well(accounted)
    both = (accounted, suite.double_well(SGHMC))
    inertia = [SGHMC.inertia(each.coordinates) for each in both]
    assert inertia[0][1] + lr**2 * 4 == pytest.approx(inertia[1][1])


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


@every_method
def test_double_well_law_tends_to_its_target(method):
    """The bias is O(lr), and O(lr²) after Richardson extrapolation."""

    def moments(lr):
        settings = {"lr": lr, "num_data": 1}
        experiment = checks.Experiment(method, targets.DoubleWell(), settings)
        law = targets.double_well_law(lr, *method.inertia(experiment.coordinates))
        return np.array([law.moment(2), law.moment(4)])

    exact = np.array([targets.target_moment(2), targets.target_moment(4)])
    coarse, fine = moments(0.02) / exact - 1, moments(0.01) / exact - 1
    assert np.all(np.abs(coarse) < 0.02)
    assert np.all(np.abs(fine) < 0.6 * np.abs(coarse))
    assert np.all(np.abs(2 * fine - coarse) < 1e-3)


def test_momentum_drawn_afresh():
    checks.check_stationary(suite.resampled(SGHMC))
    checks.check_transient(suite.resampled(SGHMC))


@pytest.mark.parametrize("momentum", [0.99, 0.5, 0.0])
@pytest.mark.parametrize("every", [1, 2, 4, 10])
def test_drawing_momentum_keeps_the_target(every, momentum):
    """Exact gradients: the law of θ is the same for every k, whatever lr."""
    target = targets.Quadratic(targets.correlated(2, seed=70), np.zeros(2))
    laws = []
    for k in (0, every):
        settings = {"lr": 0.3, "num_data": 1, "momentum": momentum}
        settings["resample_momentum_every"] = k
        experiment = checks.Experiment(SGHMC, target, settings)
        laws.append(experiment.law.cycle.stationary()[1][:2, :2])
    np.testing.assert_allclose(laws[1], laws[0], rtol=1e-9)


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
def test_noise_account():
    checks.check_stationary(suite.accounted(SGHMC))
    checks.check_transient(suite.accounted(SGHMC))


@pytest.mark.parametrize(
    ("noise_estimate", "variance"), [(0.0, 1.52), (0.025, 1.01)], ids=["off", "on"]
)
def test_noise_account_restores_the_variance(noise_estimate, variance):
    """η = α = 0.05, V = 1 on N(0, 1): β̂ = η V / 2."""
    target = targets.Quadratic(np.eye(1), np.zeros(1), np.eye(1))
    settings = {"lr": 0.05, "momentum": 0.95, "num_data": 1}
    settings["noise_estimate"] = noise_estimate
    experiment = checks.Experiment(SGHMC, target, settings, chains=100_000, seed=70)
    _, cov = experiment.law.cycle.stationary()
    assert cov[0, 0] == pytest.approx(variance, abs=0.005)
    checks.check_stationary(experiment)


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


def test_gamma_restores_the_target():
    """The variance of N(0, 1) is 1 + O(lr) with Γ, and another one without."""
    common = {
        **{"curvature": 1.0, "centre": 0.0, "num_data": 1.0, "prior_precision": 0.0},
        **{"temperature": 1.0, "eps": 0.5},
    }
    for gamma, limit in ((True, 1.0), (False, weighted_variance(0.5))):
        errors = []
        for lr in (0.04, 0.02, 0.01):
            law = memoryless_law(lr=lr, gamma=gamma, **common)
            assert law.moment(1) == pytest.approx(0, abs=1e-8)
            errors.append(law.moment(2) - limit)
        assert abs(errors[2]) < 0.02
        assert abs(errors[1]) < 0.6 * abs(errors[0])
        assert abs(errors[2]) < 0.6 * abs(errors[1])
    assert weighted_variance(0.5) > 1.6


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
    one, nothing = np.eye(d), np.zeros((d, d))
    hessian = DATA * target.hessian
    noise = np.diag(2 * STEP * (friction - estimate))
    noise = noise + (STEP * DATA) ** 2 * target.noise
    slow = np.diag(1 - STEP * friction / mass)
    kick = AffineMap(
        np.block([[one, nothing], [-STEP * (hessian + PRIOR * one), slow]]),
        np.concatenate([np.zeros(d), STEP * hessian @ target.centre]),
        np.block([[nothing, nothing], [nothing, noise]]),
    )
    move = np.block([[one, np.diag(STEP / mass)], [nothing, one]])
    step = kick.then(AffineMap(move, np.zeros(2 * d), np.zeros((2 * d, 2 * d))))
    to_v = np.diag(np.concatenate([np.ones(d), STEP / mass]))
    back = np.linalg.inv(to_v)
    cycle = AffineMap(to_v @ step.a @ back, to_v @ step.b, to_v @ step.q @ to_v)
    start = np.block([[nothing, nothing], [nothing, np.diag(mass)]])
    return Law(cycle, to_v @ start @ to_v, state=("momentum",))


def algorithm_2(mistake=""):
    """SGHMC with the hyperparameters that docs/samplers/sghmc.md says."""
    groups = []
    for width, own in SCALARS.items():
        mass, friction, estimate = own.values()
        settings = {
            "lr": STEP**2 * DATA / mass,
            "momentum": 1 - STEP * friction / mass,
            "noise_estimate": STEP * estimate / mass,
        }
        if mistake == "one mass for both groups":
            settings["lr"] = STEP**2 * DATA
        elif mistake == "friction without the mass":
            settings["momentum"] = 1 - STEP * friction
        elif mistake == "estimate without the mass":
            settings["noise_estimate"] = STEP * estimate / 2
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


@pytest.mark.parametrize(
    "mistake",
    [
        "one mass for both groups",
        "friction without the mass",
        "estimate without the mass",
    ],
)
def test_other_units_of_algorithm_2_are_caught(mistake):
    checks.assert_caught(checks.check_stationary, algorithm_2(mistake))


@pytest.mark.default
def test_thermostats_absorb_gradient_noise():
    checks.check_thermostats(suite.absorbed(THERMOSTATS))


def test_a_wrong_temperature_of_thermostats_is_caught():
    wrong = suite.absorbed(too_hot(THERMOSTATS))
    checks.assert_caught(checks.check_thermostats, wrong)


def test_law_with_thermostats():
    """Noise in balance with the friction: the law of exact gradients, but for O(lr)."""
    experiment = suite.absorbed(THERMOSTATS)
    d, c = 3, experiment.coordinates
    heat = c["lr"] * c["temperature"] / c["num_data"]
    law = experiment.law
    _, cov = law.cycle.stationary()
    # The mean of consecutive momenta has the variance lr T / N, exactly.
    both = cov + law.cycle.a @ cov
    means = (both + both.T)[d:, d:] / 4
    np.testing.assert_allclose(np.diag(means), heat, rtol=1e-9)
    # And the target's covariance is met up to O(lr), which SGHMC's is not.
    errors = {"SGNHT": [], "SGHMC": []}
    for lr in (0.002, 0.001):
        # At the same β̂, so that noise stays as strong as friction.
        noise = np.diag([0.12, 0.03, 1e-9]) * 0.1 / lr
        target = replace(experiment.target, gradient_noise=noise)
        some = {**c, "lr": np.full(d, lr)}
        exact = 0.6 * np.linalg.inv(20 * target.hessian + 8 * np.eye(d))
        for name, method in (("SGNHT", THERMOSTATS), ("SGHMC", SGHMC)):
            _, cov = method.law(target, some).cycle.stationary()
            errors[name].append(np.abs(cov[:d, :d] - exact).max() / exact.max())
    assert errors["SGNHT"][1] < 1e-3
    assert errors["SGNHT"][0] / errors["SGNHT"][1] == pytest.approx(2, rel=0.02)
    assert min(errors["SGHMC"]) > 0.5


@pytest.mark.nightly
def test_thermostats_estimate_the_noise():
    """The mean of α - A is β̂ up to O(κ): extrapolated, 2 m(κ / 2) - m(κ)."""
    means, errors = [], []
    for seed, rate in ((1, 0.004), (2, 0.002)):
        base = suite.absorbed(THERMOSTATS)
        settings = {**base.settings, "thermostat_rate": rate}
        experiment = replace(base, settings=settings, seed=seed)
        chains = checks.Chains(experiment, experiment.target.centre)
        chains.advance(round(10 * 0.4 / rate))
        values = chains.state(["thermostat"], theta=False)
        means.append(values.mean(axis=0))
        errors.append(values.var(axis=0) / len(values))
    account = 0.1 * 20 * np.array([0.12, 0.03, 1e-9]) / (2 * 0.6)
    error = np.sqrt(4 * errors[1] + errors[0])
    z = (2 * means[1] - means[0] - account) / error
    check_z({"noise account": z}, label="mean of the thermostats")


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
