"""The tables and figures of the HMC-ECS paper: a tiny run, and what it is made of."""

from dataclasses import replace

import pytest
import torch
from harness.examples import run_experiment
from hmcecs2019 import measures, samplers
from hmcecs2019.samplers import Size
from hmcecs2019.simulated import simulate

# A tiny run has fewer data in a subsample than the 100 blocks.
pytestmark = pytest.mark.filterwarnings("ignore:num_blocks")

METHODS = ["HMC", "perturbed", "signed", "SGHMC, CV", "SGLD"]


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """Five of the 29 columns, 3000 rows."""
    whole = simulate(3000, 300, tmp_path_factory.mktemp("data"))
    columns = slice(0, 5)
    return replace(whole, x=whole.x[:, columns], test_x=whole.test_x[:, columns])


@pytest.fixture(scope="module")
def laplace(problem):
    return problem.laplace(torch.zeros(5, dtype=torch.float64))


@pytest.mark.full
def test_numbers_and_pictures(tmp_path):
    options = ("--tiny", "--only", "simulated", "figure7", "figure8", "--method")
    printed, found = run_experiment("hmcecs2019.tables", tmp_path, *options, *METHODS)
    for name in (*METHODS, "95 % interval", "after the last"):
        assert name in printed
    pictures = {f"simulated_{name}" for name in ("moments", "densities", "costs")}
    assert {f.stem for f in tmp_path.glob("*.png")} == pictures | {"figure7", "figure8"}
    numbers = found["simulated"]["methods"]
    assert list(numbers) == METHODS
    assert [len(numbers[name]) for name in METHODS] == [1, 2, 2, 2, 2]


def test_all_methods_sample_the_posterior(problem, laplace, tmp_path):
    """Deviations to 15 %; a step on another scale would change them by 30 % or more."""
    truth = measures.Truth.laplace(laplace)
    size = Size(1, 300, 300, 60, 500)
    start = laplace.mode
    common = (problem, laplace)
    plain, rest = samplers.gradient_method, (300, 500, 0, tmp_path)
    runs = {
        "HMC": samplers.hmc(*common, 320, 0, tmp_path),
        "perturbed": samplers.hmc_ecs(problem, start, size, 0, tmp_path),
        "SGHMC": plain(*common, "SGHMC", 2, 0.24, *rest),
        "SGLD": plain(*common, "SGLD", 1, 0.3, *rest),
    }
    for name, run in runs.items():
        found = measures.errors(run, truth)
        assert found["mean"][0] < 4 * found["expected"], name
        assert 0.85 < found["deviation"][1] < 1.15, name
    # Without control variates the minibatches' noise heats.
    hot = samplers.gradient_method(*common, "SGHMC", 0, 0.24, 100, 50, 0, tmp_path)
    assert measures.errors(hot, truth)["deviation"][1] > 1.3
