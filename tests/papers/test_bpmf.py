"""Table 1 of the SGHMC paper on small sets of ratings."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness.examples import run_example, run_experiment
from scipy import stats
from sghmc2014.pmf import cost, data, gibbs
from sghmc2014.pmf.methods import SETTINGS
from sghmc2014.pmf.model import Factors
from sghmc2014.pmf.run import Chain, RunConfig, run

import torch_sgmcmc as sg

RATINGS = data.simulate(data.TINY)
# User 30 rates two items, item 7 has two ratings.
ML_1M = "30::7::5::978300760\n30::9::3::978302109\n12::7::1::978301968\n"
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


def test_tuning_and_the_table_of_times(tmp_path, monkeypatch):
    program = partial(run_example, "sghmc2014.bpmf", *SMALL, "--fold", 0)
    printed = program("--tune", "--method", "sghmc", "--out", tmp_path)
    assert printed.count("| SGHMC |") == 5
    median = cost.median_time
    monkeypatch.setattr(cost, "median_time", lambda part: median(part, 3))
    printed = program("--cost", "--out", tmp_path)
    assert printed.count("| update: ") == 4


@pytest.mark.parametrize("separator", ["::", "\t"])
def test_both_files_are_read(tmp_path, separator):
    path = tmp_path / "ratings"
    path.write_text(ML_1M.replace("::", separator))
    ratings = data.load(path)
    assert ratings.users.tolist() == [1, 1, 0] and ratings.items.tolist() == [0, 1, 0]
    assert ratings.values.tolist() == [5, 3, 1] and ratings.truth is None
    assert (ratings.num_users, ratings.num_items, len(ratings)) == (2, 2, 3)
    path.write_text(ML_1M.replace("::", separator).replace("5", "4"))
    assert data.load(path).name != ratings.name  # other checkpoints


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,7,5,978300760", "must be user::item::rating::time"),
        ("1::x::5::978300760", "must be user::item::rating::time"),
        ("1::7::nan::978300760", r"a rating in \[1, 5\]"),
        ("1::7::6::978300760", r"a rating in \[1, 5\]"),
        ("-1::7::5::978300760", "ids must be >= 0"),
        ("30::9::4::978300760", "user 30 rates item 9 again"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "ratings.dat"
    path.write_text(f"{ML_1M}{line}\n1::9::4::978300760\n")
    with pytest.raises(ValueError, match=f"line 4: .*{message}"):
        data.load(path)


def test_simulated_ratings_and_their_folds():
    shape = data.Shape(300, 200, 20_000)
    ratings = data.simulate(shape, seed=1)
    cells = ratings.users * 200 + ratings.items
    assert len(cells.unique()) == len(ratings) == 20_000
    noise = (ratings.values - ratings.truth).double()
    assert stats.kstest(noise.numpy() / 0.7, "norm").pvalue > 1e-3
    parts = [ratings.fold(number) for number in range(5)]
    held_back = torch.cat([test.users * 200 + test.items for _, test in parts])
    assert torch.equal(held_back.sort()[0], cells.sort()[0])
    for train, test in parts:
        assert len(train) == 16_000 and len(test) == 4000
        both = torch.cat([train.values, test.values]).sort()[0]
        assert torch.equal(both, ratings.values.sort()[0])
    with pytest.raises(ValueError, match="more than half of 60000 cells"):
        data.simulate(data.Shape(300, 200, 30_001))


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


def test_precisions_have_their_conditionals():
    chain = Chain(config("sghmc"), *RATINGS.fold(0))
    train = RATINGS.fold(0)[0]
    with torch.no_grad():
        for p in chain.model.parameters():
            p.normal_(0, 0.3)
    y = (train.values - train.values.mean()) / 4
    errors = chain.model.predict(train.users, train.items) - y
    draws = [[*chain.precision.step(), chain.noise.step()] for _ in range(400)]
    tensors = [*chain.model.parameters(), errors]
    for values, t in zip(zip(*draws, strict=True), tensors, strict=True):
        scale = 1 / (1 + float(t.detach().square().sum()) / 2)
        law = stats.gamma(1 + t.numel() / 2, scale=scale)
        assert stats.kstest(values, law.cdf).pvalue > 1e-3
    assert chain.report()["precisions"] == draws[-1]


@pytest.mark.parametrize("method", ["sgdm", "sghmc"])
def test_a_killed_run_resumes_bitwise(method, tmp_path, monkeypatch, one_thread):
    ratings, folders = RATINGS, []
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
