"""Samplers on posteriors of posteriordb: means and sds beside those of long NUTS runs.

``benchmarks/reference_posteriors.py`` has the densities, the samplers and the rule that
sets them. A difference is compared with the Monte Carlo errors of both, the sampler's
own from its effective draws. False alarms: see the note in ``harness.statistics``. A
bug is the sampler's, or one of the density that it is given.
"""

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import posteriors
import pytest
import reference_posteriors as program
from harness.statistics import StatisticalError, check_z

from torch_sgmcmc.samplers._ecs import target as ecs

pytestmark = [
    pytest.mark.full,
    # Of SBPS, on exact gradients of a density that is far from quadratic.
    pytest.mark.filterwarnings("ignore:At .* proposals of SBPS"),
]

KIDIQ = "kidiq-kidscore_momhsiq"
SCHOOLS = "eight_schools-eight_schools_noncentered"
PROCESS = "gp_pois_regr-gp_regr"
MIXTURE = "low_dim_gauss_mix-low_dim_gauss_mix"
NAMES = [KIDIQ, "arK-arK", SCHOOLS, PROCESS, MIXTURE]
LENGTHS = {"HMC": 150, "BAOA": 500, "SGNHT": 1000, "SBPS": 500, "HMC-ECS": 200}


@cache
def prepared(name):
    return program.prepare(posteriors.stored([name])[name])


def check(name, sampler, target=None, **settings):
    target = target or prepared(name)
    method = program.METHODS[sampler]
    run = method.run(target, LENGTHS[sampler], seed=1, **settings)
    check_z(program.compare(target, run).scores, label=f"{sampler} on {name}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampler", LENGTHS)
def test_a_posterior(name, sampler):
    if sampler != "HMC-ECS":
        check(name, sampler)
    elif name in (KIDIQ, MIXTURE):  # whose rows are independent
        check(name, sampler, taylor_order=1)


def changed(name, **parts):
    """The prepared coordinates with another density."""
    target = prepared(name)
    return replace(target, posterior=replace(target.posterior, **parts))


def without_jacobian():
    right = posteriors.TRANSFORMS["positive"]
    wrong = {"positive": lambda u: (right(u)[0], 0 * u)}
    with patch.dict(posteriors.TRANSFORMS, wrong):
        check(SCHOOLS, "HMC")


def with_wrong_weights():
    """N / m of half as many rows: the likelihood counts twice."""
    right = ecs.ecs_estimate

    def wrong(*terms, num_data, **sizes):
        return right(*terms, num_data=2 * num_data, **sizes)

    with patch.object(ecs, "ecs_estimate", wrong):
        check(KIDIQ, "HMC-ECS", taylor_order=1)


BUGS = {
    "HMC, no Jacobian": without_jacobian,
    "HMC, no Metropolis test": lambda: check("arK-arK", "HMC", metropolis=False),
    "BAOA, 10 % more noise": lambda: check("arK-arK", "BAOA", temperature=1.21),
    "SGNHT, no prior": lambda: check(
        PROCESS, "SGNHT", changed(PROCESS, log_prior=posteriors.flat)
    ),
    "SGNHT, momenta of more data": lambda: check(KIDIQ, "SGNHT", num_data=600),
    "SBPS, a band of no width": lambda: check(KIDIQ, "SBPS", num_std=0.0),
    "HMC-ECS, wrong weights": with_wrong_weights,
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug):
    with pytest.raises(StatisticalError):
        BUGS[bug]()
