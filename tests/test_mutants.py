"""Every known bug fails the checks that the samplers pass.

The checks are those of ``test_sampling_law.py``; real samplers, right references and
mutants differ only in the class that :class:`harness.methods.Method` builds.
"""

from dataclasses import replace
from functools import partial

import pytest
from harness import suite
from harness.chains import check_double_well, check_stationary, check_transient
from harness.gibbs import check_conditional, check_joint
from harness.methods import METHODS, Method
from harness.mutants import (
    SGHMC_MUTATIONS,
    SGLD_MUTATIONS,
    ReferenceSGHMC,
    ReferenceSGLD,
)
from harness.precision_mutants import PRECISION_MUTATIONS, ReferencePrecision
from harness.statistics import StatisticalError

REFERENCES = {"SGLD": ReferenceSGLD, "SGHMC": ReferenceSGHMC}

# Bugs that leave the plain experiment as it is: where they show instead.
ELSEWHERE = {
    "noise account ignored": (check_stationary, suite.accounted),
    "noise account applied twice": (check_stationary, suite.accounted),
    "noise account added": (check_stationary, suite.accounted),
    "momentum never resampled": (check_stationary, suite.resampled),
    "momentum resampled one step late": (check_stationary, suite.resampled),
    "momentum resampled from N(0, lr T / N)": (check_stationary, suite.resampled),
    "momentum starts at rest": (check_transient, suite.all_at_once),
    "momentum starts with the step's noise": (check_transient, suite.all_at_once),
}


def reference(name: str, mutation: str | None) -> Method:
    method = next(m for m in METHODS if m.name == name)
    return replace(
        method,
        name=f"{name} mutant ({mutation})",
        build=partial(REFERENCES[name], mutation=mutation),
    )


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        *(("SGLD", mutation) for mutation in SGLD_MUTATIONS),
        *(("SGHMC", mutation) for mutation in SGHMC_MUTATIONS),
    ],
)
def test_a_bug_is_caught(name: str, mutation: str) -> None:
    check, experiment = ELSEWHERE.get(mutation, (check_stationary, suite.all_at_once))
    with pytest.raises(StatisticalError):
        check(experiment(reference(name, mutation)))


# One mild bug in every experiment: none of them is blind.
EXPERIMENTS = {
    "Gaussian, d = 1": (check_stationary, lambda m: suite.gaussian(m, 1)),
    "Gaussian, d = 2": (check_stationary, lambda m: suite.gaussian(m, 2)),
    "Gaussian, d = 20": (check_stationary, lambda m: suite.gaussian(m, 20)),
    "noisy, d = 1": (check_stationary, lambda m: suite.gaussian(m, 1, noisy=True)),
    "noisy, d = 20": (check_stationary, lambda m: suite.gaussian(m, 20, noisy=True)),
    "minibatches, d = 1": (check_stationary, lambda m: suite.minibatches(m, 1)),
    "minibatches, d = 20": (check_stationary, lambda m: suite.minibatches(m, 20)),
    "groups": (check_stationary, suite.per_group),
    "Gaussian, transient": (check_transient, lambda m: suite.gaussian(m, 2)),
    "minibatches, transient": (check_transient, lambda m: suite.minibatches(m, 2)),
    "groups, transient": (check_transient, suite.per_group),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("case", EXPERIMENTS)
def test_every_experiment_sees_noise_2_percent_too_large(name: str, case: str) -> None:
    check, experiment = EXPERIMENTS[case]
    with pytest.raises(StatisticalError):
        check(experiment(reference(name, "noise 2 % too large")))


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        ("SGLD", "factor 2 missing"),
        ("SGLD", "seed reused between steps"),
        ("SGHMC", "factor 2 missing"),
        ("SGHMC", "explicit Euler"),
    ],
)
def test_the_double_well_sees_bugs(name: str, mutation: str) -> None:
    with pytest.raises(StatisticalError):
        check_double_well(suite.double_well(reference(name, mutation)))


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("check", [check_stationary, check_transient])
def test_the_references_are_right(name: str, check) -> None:
    right = reference(name, None)
    check(suite.all_at_once(right))
    check(suite.per_group(right))


@pytest.mark.parametrize("check", [check_stationary, check_transient])
def test_the_sghmc_reference_is_right(check) -> None:
    right = reference("SGHMC", None)
    check(suite.accounted(right))
    check(suite.resampled(right))


# ---- Gibbs updates of prior precisions -------------------------------------------

# T ≠ 1, and a shape and rate that matter beside the weights.
GIBBS = {"shape": 3.0, "rate": 0.3, "temperature": 0.5, "seed": 3}
# These keep the law of each group's λ: they show in its dependence on other draws.
KEEP_THE_MARGINAL = {"one draw for all groups", "draw of the update before"}


@pytest.mark.parametrize("mutation", PRECISION_MUTATIONS)
def test_a_bug_in_the_conditional_is_caught(mutation: str) -> None:
    with pytest.raises(StatisticalError):
        check_conditional(partial(ReferencePrecision, mutation=mutation), **GIBBS)


@pytest.mark.parametrize(
    "mutation", [m for m in PRECISION_MUTATIONS if m not in KEEP_THE_MARGINAL]
)
def test_a_bug_in_the_joint_law_is_caught(mutation: str) -> None:
    with pytest.raises(StatisticalError):
        check_joint(partial(ReferencePrecision, mutation=mutation), **GIBBS)


@pytest.mark.parametrize("check", [check_conditional, check_joint])
def test_the_gibbs_reference_is_right(check) -> None:
    check(ReferencePrecision, **GIBBS)
