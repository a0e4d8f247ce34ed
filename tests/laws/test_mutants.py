"""A bug of each known class fails the checks that the samplers pass."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from harness import chains as checks
from harness import gibbs, mutants, suite
from harness.methods import METHODS, THERMOSTATS, Method, frozen_psgld
from harness.statistics import StatisticalError
from harness.targets import LogGamma
from levels import at_levels

pytestmark = pytest.mark.nightly

REFERENCES = {"SGLD": mutants.ReferenceSGLD, "SGHMC": mutants.ReferenceSGHMC}
REFERENCES |= {"PSGLD frozen": mutants.ReferencePSGLD, "SGNHT": mutants.ReferenceSGNHT}

# Bugs that leave the plain experiment as it is: where they show instead.
ELSEWHERE = {
    "noise account ignored": (checks.check_stationary, suite.accounted),
    "momentum never resampled": (checks.check_stationary, suite.resampled),
    "momentum resampled one step late": (checks.check_stationary, suite.resampled),
    "momentum starts at rest": (checks.check_transient, suite.all_at_once),
}


def reference(name, mutation):
    method = next(m for m in METHODS if m.name == name)
    build = partial(REFERENCES[name], mutation=mutation)
    if method.build is frozen_psgld:
        build = partial(frozen_psgld, cls=build)
    return replace(method, name=f"{name} mutant ({mutation})", build=build)


def adapting(mutation):
    """pSGLD that has not been frozen."""
    build = partial(mutants.ReferencePSGLD, mutation=mutation)
    return Method("PSGLD mutant", build, lambda *_: None, lambda *_: None)


def at_work(mutation):
    """SGNHT with thermostats that move."""
    return replace(
        THERMOSTATS, build=partial(mutants.ReferenceSGNHT, mutation=mutation)
    )


# Thermostats that settle in half the steps of those that the sampler is tested with.
QUICKLY = {"thermostat_rate": 4e-3}


def few(experiment):
    """Returns the first statistics of :func:`assert_caught`."""
    return replace(experiment, chains=experiment.chains // 10)


@pytest.mark.parametrize(
    ("name", "mutation"),
    at_levels(
        [
            *(("SGLD", mutation) for mutation in mutants.SGLD_MUTATIONS),
            *(("SGHMC", mutation) for mutation in mutants.SGHMC_MUTATIONS),
            *(("PSGLD frozen", mutation) for mutation in mutants.PSGLD_MUTATIONS),
            *(("SGNHT", mutation) for mutation in mutants.SGNHT_MUTATIONS),
        ],
        default=[
            ("SGLD", "T instead of sqrt(T)"),
            ("SGHMC", "friction forgotten in the noise"),
            ("PSGLD frozen", "preconditioner not in the noise"),
            ("SGNHT", "explicit Euler"),
        ],
        otherwise="full",
    ),
)
def test_a_bug_is_caught(name, mutation):
    check, experiment = ELSEWHERE.get(
        mutation, (checks.check_stationary, suite.all_at_once)
    )
    checks.assert_caught(check, experiment(reference(name, mutation)))


@pytest.mark.parametrize(
    "mutation",
    at_levels(mutants.THERMOSTAT_MUTATIONS, full=["N forgotten in the thermostat"]),
)
def test_a_bug_of_the_thermostat_is_caught(mutation):
    checks.assert_caught(
        checks.check_thermostats, suite.absorbed(at_work(mutation), **QUICKLY)
    )


def test_the_thermostat_reference_is_right():
    checks.check_thermostats(suite.absorbed(at_work(None), **QUICKLY))
    checks.check_thermostats(few(suite.absorbed(at_work(None), **QUICKLY)))


@pytest.mark.parametrize(
    "mutation", at_levels(mutants.GAMMA_MUTATIONS, full=["gamma without T"])
)
def test_a_bug_of_gamma_is_caught(mutation):
    checks.assert_caught(
        checks.check_memoryless, suite.memoryless(adapting(mutation), gamma=True)
    )


def test_a_bug_of_the_start_is_caught():
    mutant = adapting("gamma starts with the first square and its slope")
    checks.assert_caught(checks.check_start, suite.started(mutant))


def test_gamma_of_the_last_gradient_alone_is_caught():
    """The term of the paper's text: most of the bias stays without it."""
    mutant = adapting("gamma of the last gradient alone")
    check = partial(checks.check_extrapolated, moments=np.array([0.0, 1.0]), time=12)
    checks.assert_caught(check, suite.normal(mutant, **suite.FELT_GAMMA))


def test_gamma_without_the_jacobians_is_caught():
    """The mean of a skewed target moves if V remembers more than the chain."""
    means = {}
    for mutation in (None, "gamma without the Jacobians"):
        experiment = suite.skewed(adapting(mutation), decay=0.998, eps=1e-5)
        chains = checks.Chains(replace(experiment, chains=8000), np.ones(1))
        chains.advance(2000)
        means[mutation] = chains.state().mean() - LogGamma.mean
    assert abs(means[None]) < 0.05  # 3.5 standard errors
    assert means["gamma without the Jacobians"] < -0.2


def test_the_adapting_reference_is_right():
    checks.check_memoryless(suite.memoryless(adapting(None), gamma=True))
    checks.check_memoryless(few(suite.memoryless(adapting(None), gamma=True)))
    moments = np.array([0.0, 1.0])
    normal = suite.normal(adapting(None), **suite.FELT_GAMMA)
    checks.check_extrapolated(normal, moments, time=12)
    checks.check_extrapolated(few(normal), moments, time=12)
    checks.check_start(suite.started(adapting(None)))
    checks.check_start(few(suite.started(adapting(None))))


@pytest.mark.parametrize(
    ("check", "name"),
    [
        *product([checks.check_stationary], ["Gaussian", *suite.NOISY, "groups"]),
        *product([checks.check_transient], ["Gaussian", "minibatches", "groups"]),
    ],
)
def test_every_experiment_sees_noise_2_percent_too_large(check, name):
    """One mild bug in every experiment: none of them is blind."""
    experiment = suite.EXPERIMENTS[name]
    checks.assert_caught(check, experiment(reference("SGHMC", "noise 2 % too large")))


@pytest.mark.parametrize(
    ("name", "mutation"), [("SGLD", "factor 2 missing"), ("SGHMC", "explicit Euler")]
)
def test_the_double_well_sees_bugs(name, mutation):
    checks.assert_caught(
        checks.check_double_well, suite.double_well(reference(name, mutation))
    )


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("check", [checks.check_stationary, checks.check_transient])
def test_the_references_are_right(name, check):
    right = reference(name, None)
    for experiment in (suite.all_at_once(right), suite.per_group(right)):
        check(experiment)
        check(few(experiment))  # by which most bugs are caught


@pytest.mark.parametrize("check", [checks.check_stationary, checks.check_transient])
def test_the_sghmc_reference_is_right(check):
    right = reference("SGHMC", None)
    for experiment in (suite.accounted(right), suite.resampled(right)):
        check(experiment)
        check(few(experiment))


# T ≠ 1, and a shape and rate that matter beside the weights.
GIBBS = {"shape": 3.0, "rate": 0.3, "temperature": 0.5, "seed": 3}


@pytest.mark.parametrize(
    "mutation", at_levels(gibbs.PRECISION_MUTATIONS, full=gibbs.PRECISION_MUTATIONS[:1])
)
def test_a_bug_in_the_conditional_is_caught(mutation):
    with pytest.raises(StatisticalError):
        gibbs.check_conditional(
            partial(gibbs.ReferencePrecision, mutation=mutation), **GIBBS
        )


def test_a_bug_in_the_joint_law_is_caught():
    with pytest.raises(StatisticalError):
        mutant = partial(gibbs.ReferencePrecision, mutation="T on the rate only")
        gibbs.check_joint(mutant, **GIBBS)


@pytest.mark.parametrize("check", [gibbs.check_conditional, gibbs.check_joint])
def test_the_gibbs_reference_is_right(check):
    check(gibbs.ReferencePrecision, **GIBBS)
