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


def test_flymc_spends_as_much(data_root, monkeypatch):
    """Likelihoods, by a count of those that the bound is asked for."""
    split = blr.data.load(data_root)
    right, asked = blr.flymc.LogisticBound.log_ratio, []

    def counting(target, theta, *places):
        asked.append((len(places[0]), theta))
        return right(target, theta, *places)

    monkeypatch.setattr(blr.flymc.LogisticBound, "log_ratio", counting)
    centre, hessian, passes = blr.reference.newton(split)
    for name in ("flymc", "flymc_mode", "flymc_adapted"):
        asked.clear()
        method = blr.methods.METHODS[name]
        h = method.step_size or method.tuned
        config = blr.run.RunConfig(name, h, 1.5, 50, 4, 5, 0)
        result = blr.run.run(config, split)
        made = sum(count for count, _ in asked) / (4 * 1200)
        assert result["passes_made"] == pytest.approx(made)
        assert 1.5 <= made < 1.55
        assert result["setup_passes"] == passes + 1
        assert [point["passes"] for point in result["curve"][::6]] == [0, 0.5, 1, 1.5]
        assert len(set(result["final"]["log_likelihood"])) == 4
        if method.adapted:
            assert 0 < abs(result["adapted_step_size"] - h)
        # Of the first proposals, those of the four chains.
        away = asked[0][1] - (centre if method.from_mode else 0)
        if method.adapted:
            away = away @ torch.linalg.cholesky(hessian)
        size = away.square().mean().sqrt() / h
        assert float(size) == pytest.approx(1, abs=0.2)  # 4 deviations
    assert 3 * 2 <= passes - 1 <= 3 * 20  # two energies at least for each gradient


def test_the_mode_equals_that_of_scikit_learn(data_root):
    from sklearn.linear_model import LogisticRegression

    split = blr.data.load(data_root)
    theta, hessian = blr.reference.mode(split)
    other = LogisticRegression(C=10, fit_intercept=False, tol=1e-10, max_iter=10_000)
    other.fit(split.train_x.double().numpy(), split.train_s.numpy())
    np.testing.assert_allclose(theta.numpy(), other.coef_[0], atol=1e-4)
    x = theta.clone().requires_grad_()
    exact = torch.autograd.functional.hessian(
        lambda t: blr.model.potential(t[None], split).sum(), x
    )
    torch.testing.assert_close(hessian, exact)
    mine = blr.model.scores(theta.float()[None], split)
    test = split.test_x.double().numpy(), split.test_s.numpy()
    assert mine["accuracy"][0] == pytest.approx(100 * other.score(*test))
    probabilities = other.predict_proba(test[0])[np.arange(300), (test[1] > 0) * 1]
    together = blr.model.mixture_scores(theta.float()[None], split)
    assert together["accuracy"] == pytest.approx(mine["accuracy"][0])
    for value in (mine["log_likelihood"][0], together["log_likelihood"]):
        assert value == pytest.approx(np.log(probabilities).mean(), abs=1e-4)


def test_the_reference_draws_from_the_posterior(data_root):
    """Against importance sampling with the Gaussian at the mode, in U itself."""
    split = blr.data.load(data_root)
    centre, hessian = blr.reference.mode(split)
    draws = blr.reference.posterior_draws(split, chains=400, steps=100, seed=1).double()
    near = torch.distributions.MultivariateNormal(centre, precision_matrix=hessian)
    g = torch.Generator().manual_seed(0)
    factor = torch.linalg.cholesky(hessian)
    z = torch.randn(40_000, 54, generator=g, dtype=torch.float64)
    points = centre + torch.linalg.solve_triangular(factor.T, z.T, upper=True).T
    u = torch.cat([blr.model.potential(p, split) for p in points.split(2000)])
    weights = torch.softmax(-u - near.log_prob(points), 0)
    size = 1 / float(weights.square().sum())
    assert size > 1000  # draws that the 40,000 are worth: the two do overlap
    mean = weights @ points
    deviation = (weights @ (points - mean) ** 2).sqrt()
    error = (1 / 400 + 1 / size) ** 0.5
    z_scores = (draws.mean(0) - mean) / deviation / error
    assert float(z_scores.abs().max()) < 4.5  # 54 of them: once in 3000 runs
    ratio = draws.var(0) / deviation**2
    assert float((ratio - 1).abs().max()) < 4.5 * 2**0.5 * error
