"""Table 1 of the SGHMC paper on small sets of ratings."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness.examples import run_experiment
from scipy import stats
from sghmc2014.pmf import cost, data, gibbs
from sghmc2014.pmf.methods import SETTINGS
from sghmc2014.pmf.model import Factors
from sghmc2014.pmf.run import Chain, RunConfig, run

import torch_sgmcmc as sg

RATINGS = data.simulate(data.TINY)
SMALL = ("--tiny", "--batch-size", 100, "--dimensions", 3)

example = partial(run_experiment, "sghmc2014.bpmf")


def config(method, **changes):
    """The configuration of a short run."""
    settings = SETTINGS[method] | {"lr": 0.03 * SETTINGS[method]["lr"]}
    chain = (method, 0, tuple(settings.items()), 6, 4, 20, 5, 100, 3, RATINGS.name)
    return replace(RunConfig(*chain), **changes)


def test_every_method_reports(tmp_path):
    printed, document = example(tmp_path, *SMALL, "--fold", 0, 3)
    for label in ("SGD", "SGD with momentum", "SGLD", "SGHMC", "*the true means*"):
        assert f"| {label} |" in printed
    assert (tmp_path / "bpmf.png").exists()
    for method, states in document["runs"].items():
        assert [state["config"]["fold"] for state in states] == [0, 3]
        for state in states:
            last = state["history"][-1]
            assert last["step"] == 400
            assert last["samples"] == (20 if method in ("sgld", "sghmc") else 0)
            # Of all ratings alike it would be 1.1.
            assert 0.6 < state["oracle"] < last["rmse"] < 1.05
    reference = ("--reference", "--fold", 0, "--sweeps", 60)
    printed, _ = example(tmp_path, *SMALL, *reference)
    assert "Fold 0, 40 sweeps: RMSE 0." in printed
    history = json.loads((tmp_path / "reference-fold0.json").read_text())["history"]
    oracle = document["runs"]["sghmc"][0]["oracle"]
    assert oracle < history[-1]["rmse"] < history[-1]["last"] < 1.05


def test_a_file_is_factorised(tmp_path):
    values = RATINGS.values.round().clamp(1, 5).int()
    rows = zip(RATINGS.users, RATINGS.items, values, strict=True)
    path = tmp_path / "u.data"
    path.write_text("".join(f"{u + 1}\t{i + 1}\t{r}\t88\n" for u, i, r in rows))
    options = ("--ratings", path, *SMALL, "--method", "sgld", "--fold", 1)
    printed, _ = example(tmp_path / "out", *options)
    assert "u.data (1000 ratings, " in printed and "true means" not in printed
    with path.open("a") as file:
        file.write("1\t2\n")
    with pytest.raises(SystemExit, match=r"u\.data, line 1001: got '1\\t2'"):
        example(tmp_path / "out", *options)


def test_the_gradient_is_autograds():
    ratings = RATINGS
    model = Factors(60, 40, 3, seed=0)
    rows = torch.tensor([3, 3, 7, 500, 42])  # the first twice
    users, items, y = (t[rows] for t in (ratings.users, ratings.items, ratings.values))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
            p.grad.fill_(torch.nan)  # of a former minibatch
    buffers = [p.grad for p in model.parameters()]
    model.gradient(users, items, y, 2.5)
    mine = [p.grad.clone() for p in model.parameters()]
    assert all(p.grad is g for p, g in zip(model.parameters(), buffers, strict=True))
    mean = (model.u[users] * model.v[items]).sum(1) + model.a[users] + model.b[items]
    torch.testing.assert_close(model.predict(users, items), mean.detach())
    loss = 2.5 * (mean - y).square().mean() / 2
    right = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(mine, list(right))
    untouched = torch.ones(60, dtype=torch.bool)
    untouched[users] = False
    assert untouched.any() and not mine[0][untouched].any()
    for embedding in (False, True):  # what the table of times compares with
        cost.by_autograd(model, users, items, y, embedding)
        theirs = [2.5 * p.grad for p in model.parameters()]
        torch.testing.assert_close(theirs, list(right))


def test_a_killed_run_resumes_bitwise(tmp_path, monkeypatch, one_thread):
    ratings, folders, method = RATINGS, [], "sghmc"
    for name in ("whole", "parts"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
    whole = run(config(method), ratings, folders[0])
    right, rounds = Chain.round, []

    def killed(chain, number):
        rounds.append(number)
        right(chain, number)
        if number == 4:  # between a hyperparameter's draw and the next checkpoint
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "round", killed)
        with pytest.raises(KeyboardInterrupt):
            run(config(method), ratings, folders[1])
    parts = run(config(method), ratings, folders[1])
    assert rounds == [0, 1, 2, 3, 4]
    assert parts["history"] == whole["history"] and len(whole["history"]) == 6
    one, other = (sg.load(config(method).checkpoint(folder)) for folder in folders)
    for tensor, name in ((t, n) for n, t in one["model"].items()):
        assert torch.equal(tensor, other["model"][name])
    assert torch.equal(one["mean"]["mean"], other["mean"]["mean"])
    with pytest.raises(SystemExit, match="other settings"):
        run(config(method, batch_size=50), ratings, folders[0])


def test_the_reference_draws_rows_from_their_conditionals():
    """Against the Gaussian of each user's ratings, one by one."""
    g = torch.Generator().manual_seed(0)
    train = RATINGS.fold(0)[0]
    y = torch.randn(len(train), generator=g)
    v, b = torch.randn(40, 3, generator=g), torch.randn(40, generator=g)
    side = gibbs.Side(train.users, train.items, y, 61)  # one without any
    prior = torch.tensor([2.0, 2.0, 2.0, 5.0], dtype=torch.float64)
    drawn = [side.draw(v, b, prior, 0.7, g) for _ in range(500)]
    draws = torch.stack([torch.cat([u, a[:, None]], 1) for u, a in drawn]).double()
    for user in (0, 17, 60):
        of = train.users == user
        x = torch.cat([v[train.items[of]], torch.ones(int(of.sum()), 1)], 1).double()
        covariance = torch.linalg.inv(0.7 * x.T @ x + torch.diag(prior))
        mean = covariance @ (0.7 * x.T @ (y - b[train.items])[of].double())
        factor, away = torch.linalg.cholesky(covariance), draws[:, user] - mean
        white = torch.linalg.solve_triangular(factor, away.T, upper=False)
        for row in white:
            assert stats.kstest(row.numpy(), "norm").pvalue > 1e-3
        assert (torch.corrcoef(white) - torch.eye(4)).abs().max() < 0.2
