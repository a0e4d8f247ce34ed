"""Samplers on posteriors of posteriordb: means and sds beside those of long NUTS runs.

``benchmarks/references`` has the densities, the samplers and the rule that sets them. A
difference is compared with the Monte Carlo errors of both, the sampler's own from its
effective draws. False alarms: see the note in ``harness.statistics``. A bug is the
sampler's, or one of the density that it is given.
"""

import json
import zipfile
from dataclasses import replace
from functools import cache
from textwrap import dedent
from unittest.mock import patch

import log_densities
import numpy as np
import pytest
import reference_posteriors as program
from harness.statistics import StatisticalError, check_z

from torch_sgmcmc.core import ops

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
LENGTHS = {"HMC": 150, "BAOA": 400, "SGNHT": 800, "SBPS": 500, "HMC-ECS": 120}


@cache
def prepared(name):
    return program.prepare(log_densities.stored([name])[name])


def check(name, sampler, target=None, times=1, **settings):
    target = target or prepared(name)
    method = program.METHODS[sampler]
    run = method.run(target, times * LENGTHS[sampler], seed=1, **settings)
    check_z(program.compare(target, run).scores, label=f"{sampler} on {name}")


CASES = [(name, sampler) for name in NAMES for sampler in LENGTHS]
WITHOUT_ROWS = (SCHOOLS, PROCESS)


@pytest.mark.parametrize(
    ("name", "sampler"),
    [case for case in CASES if case[1] != "HMC-ECS" or case[0] not in WITHOUT_ROWS],
)
def test_a_posterior(name, sampler):
    settings = {}
    if sampler == "HMC-ECS":  # the subsample has all curvature, and its weights matter
        settings = {"taylor_order": 1}
    elif (name, sampler) == (SCHOOLS, "SBPS"):  # a long tail, which a short run misses
        settings = {"times": 2}
    check(name, sampler, **settings)


def changed(name, **parts):
    """The prepared coordinates with another density."""
    target = prepared(name)
    return replace(target, posterior=replace(target.posterior, **parts))


def without_jacobian():
    right = log_densities.TRANSFORMS["positive"]
    wrong = {"positive": lambda u: (right(u)[0], 0 * u)}
    with patch.dict(log_densities.TRANSFORMS, wrong):
        check(PROCESS, "HMC")  # others are improper then


def with_wrong_weights():
    """N / m of half as many rows: the likelihood counts twice."""
    right = ops.ecs_estimate

    def wrong(*terms, num_data, **sizes):
        return right(*terms, num_data=2 * num_data, **sizes)

    with patch.object(ops, "ecs_estimate", wrong):
        check(KIDIQ, "HMC-ECS", taylor_order=1)


BUGS = {
    "HMC, no Jacobian": without_jacobian,
    "HMC, no Metropolis test": lambda: check("arK-arK", "HMC", metropolis=False),
    "BAOA, 10 % more noise": lambda: check("arK-arK", "BAOA", temperature=1.21),
    "SGNHT, no prior": lambda: check(
        PROCESS, "SGNHT", changed(PROCESS, log_prior=log_densities.flat)
    ),
    "SGNHT, momenta of more data": lambda: check(KIDIQ, "SGNHT", num_data=600),
    "SBPS, a band of no width": lambda: check(KIDIQ, "SBPS", times=2, num_std=0.0),
    "HMC-ECS, wrong weights": with_wrong_weights,
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug):
    with pytest.raises(StatisticalError):
        BUGS[bug]()


def test_a_posterior_of_a_file(tmp_path):
    """The example of the docstring, whose moments are exact."""
    path = tmp_path / "counts.py"
    path.write_text(dedent(log_densities.__doc__.partition("::\n\n")[2]))
    target = program.prepare(log_densities.of_file(path))
    check("a file", "HMC", target)
    with pytest.raises(StatisticalError):
        check("a file", "HMC", target, temperature=1.21)


def test_a_posterior_of_posteriordb(tmp_path):
    """A folder laid out as its repository."""
    rng = np.random.default_rng(0)
    draws = [{"rho": rng.normal(3, 2, 4000).tolist()} for _ in range(2)]
    files = {
        "posteriors/a": {
            "data_name": "b",
            "model_name": "gp_regr",
            "reference_posterior_name": "c",
        },
        "data/info/b.info": {"data_file": "data/data/b.json"},
        "data/data/b": {"x": [1.0, 2.0], "y": [0.5, 1]},
        "reference_posteriors/draws/draws/c": draws,
    }
    for name, content in files.items():
        path = tmp_path / f"posterior_database/{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        with zipfile.ZipFile(f"{path}.zip", "w") as archive:
            archive.write(path, path.name)
    record = log_densities.of_posteriordb(tmp_path, "a")
    assert record["data"] == files["data/data/b"]
    mean, sd, mean_error, sd_error = record["reference"]["rho"]
    assert abs(mean - 3) < 5 * mean_error and abs(sd - 2) < 5 * sd_error
    # Of normal draws: sd / sqrt(n), and sd / sqrt(2 n).
    assert mean_error == pytest.approx(sd / 8000**0.5)
    assert sd_error == pytest.approx(mean_error / 2**0.5, rel=0.05)
    assert log_densities.of_record(record).dimension == 3
