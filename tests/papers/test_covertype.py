"""The logistic regression example on a small file of Covertype's form."""

from functools import partial

import numpy as np
import pytest
import torch
from ewsg2021 import blr
from harness.examples import run_experiment

GRADIENTS = ("sgld", "psgld", "sghmc", "cp_sghmc", "ewsg")
METHODS = {
    "paper": (*GRADIENTS, "flymc", "flymc_mode"),
    "tuned": (*GRADIENTS, "flymc", "flymc_adapted"),
}


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    """1500 rows: 10 numbers, one of 4 areas, one of 40 soils, the class."""
    random = np.random.default_rng(0)
    rows = np.zeros((1500, 55), dtype=int)
    numbers = random.standard_normal((1500, 10))
    rows[:, :10] = np.round(100 + 30 * numbers)
    rows[np.arange(1500), 10 + random.integers(4, size=1500)] = 1
    rows[np.arange(1500), 14 + random.integers(40, size=1500)] = 1
    logit = numbers @ np.linspace(-1.5, 1.5, 10) + rows[:, 10] - rows[:, 12]
    is_second = random.random(1500) < 1 / (1 + np.exp(-logit))
    rows[:, 54] = np.where(is_second, 2, random.choice([1, 3, 7], 1500))
    root = tmp_path_factory.mktemp("data")
    (root / "covertype").mkdir()
    path = root / "covertype" / "covtype_subset.data.gz"
    np.savetxt(path, rows, fmt="%d", delimiter=",")
    return root


@pytest.fixture
def example(data_root, tmp_path):
    """Runs the experiment with six chains."""
    options = ("--data-root", data_root, "--chains", 6)
    return partial(run_experiment, "ewsg2021.covertype", tmp_path, *options)


def test_all_methods_report_table_picture_and_json(example, tmp_path):
    options = ("--passes", 1, "--reference-steps", 3, "--strata", 4)
    printed, document = example(*options)
    for label in ("SGLD", "pSGLD", "SGHMC", "CP-SGHMC", "EWSG", "posterior", "mode"):
        assert f"| {label} |" in printed
    assert printed.count("| FlyMC |") == 2
    assert printed.count("| FlyMC from the mode") == 2
    assert (tmp_path / "curves.png").exists()
    assert document["environment"]["training rows"] == 1200
    finals = set()
    for which, results in document["runs"].items():
        assert tuple(results) == METHODS[which]
        for name, result in results.items():
            if name in GRADIENTS:
                assert result["steps"] == 1200 / (100 if name == "ewsg" else 50)
            assert result["curve"][-1]["passes"] == 1
            assert len(result["final"]["accuracy"]) == 6
            finals.add(str(result["final"]))
    # Chains differ, and so do methods; where a step size was not changed runs repeat.
    assert len(finals) >= len(METHODS["paper"])


def test_step_sizes_of_all_methods(example, tmp_path):
    options = ("--h", 0.001, 0.002, "--passes", 0.1, "--halved")
    printed, document = example(*options, "--method", "sghmc", "ewsg")
    assert "| SGHMC | 0.001 |" in printed and "| EWSG, halved | 0.002 |" in printed
    assert [r["config"]["step_size"] for r in document["steps"]] == [1e-3, 2e-3] * 2
    assert (tmp_path / "steps.png").exists()


def test_the_noise_of_all_data(example, monkeypatch):
    """lr N and the momentum are those that the paper's h has on all rows."""
    monkeypatch.setattr("ewsg2021.covertype.FULL_SIZE", 4 * 1500)
    options = ("--noise", "--passes", 0.1, "--splits", 2, "--strata", 4)
    printed, document = example(*options)
    assert printed.count("| SGHMC |") == 2 and "FlyMC" not in printed
    assert tuple(document["noise"]) == GRADIENTS
    for name, settings in document["noise"].items():
        paper, noise = settings["h"][0]["settings"], settings["noise"][0]["settings"]
        # On all data, with the paper's h, lr is N h, N h² or, pSGLD's, h.
        lr = paper["lr"] * (1 if name == "psgld" else 4)
        assert noise["lr"] == pytest.approx(4 * lr)
        assert noise.get("momentum") == pytest.approx(paper.get("momentum"))
        scores = [r["final"]["log_likelihood"] for r in settings["h"]]
        assert len(scores) == 2 and scores[0] != scores[1]


def test_the_search_for_step_sizes(example, tmp_path):
    printed, document = example("--tune", "--method", "ewsg", "--passes", 0.1)
    assert printed.count("| EWSG |") == 8
    assert (tmp_path / "search.png").exists()
    search = document["search"]
    assert [r["settings"]["num_data"] for r in search] == [960] * 8
    assert all(0 < r["acceptance_rate"] <= 1 for r in search)


def test_the_papers_step_sizes(data_root):
    """One step written out in the paper's notation, from θ = r = 0, without noise."""
    split = blr.data.load(data_root)
    x, s = split.train_x[:50], split.train_s[:50]
    count = len(split.train_x)
    gradient = -(s[:, None] * x).mean(0) / 2 * count  # of U at θ = 0
    # h, h² and as much for EWSG.
    for name, factor in (("sgld", 2e-5), ("sghmc", 1e-6), ("ewsg", 9e-6)):
        method = blr.methods.METHODS[name]
        theta = torch.nn.Parameter(torch.zeros(3, 54))
        sampler = method.build(theta, count, method.step_size, 0)
        group = sampler.param_groups[0]
        assert group["prior_precision"] == 0.1 and group["temperature"] == 1
        if "momentum" in group:
            assert group["momentum"] == pytest.approx(1 - 50 * method.step_size)
            sampler.state[theta]["momentum"] = torch.zeros(3, 54)
        group["temperature"] = 1e-30  # > 0 for EWSG's weights

        def closure(theta=theta, sampler=sampler):
            sampler.zero_grad()
            loss = blr.model.minibatch_loss(theta, x.expand(3, -1, -1), s.expand(3, -1))
            loss.backward()
            return loss

        sampler.step(closure)
        want = -factor * gradient
        torch.testing.assert_close(theta[2].detach(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("halved", [False, True])
def test_every_method_spends_the_same(data_root, monkeypatch, halved):
    split = blr.data.load(data_root)
    right, seen = blr.run.minibatch_loss, []

    def counting(theta, x, s):
        assert x.shape[0] == len(theta) == 4
        seen.append(x.shape[1])
        return right(theta, x, s)

    monkeypatch.setattr(blr.run, "minibatch_loss", counting)
    for name in GRADIENTS:
        seen.clear()
        config = blr.run.RunConfig(name, 1e-5, 1.0, 50, 4, 5, 0, halved=halved)
        result = blr.run.run(config, split)
        assert sum(seen) == 1200
        assert set(seen) == ({25} if name == "ewsg" and halved else {50})
        chains = result["final"]["log_likelihood"]
        assert len(set(chains)) == 4  # each its own noise and minibatches
