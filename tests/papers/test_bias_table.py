"""The table of biases: its errors, a short table, and the data for the truth."""

import numpy as np
import pytest
import torch
from bias import problems
from harness.examples import run_example, run_experiment


@pytest.fixture(scope="module")
def problem(data_root):
    return problems.load("logistic", data_root, 1000)


def write_truth(path, problem):
    """Draws of a normal approximation, in four chains, as NUTS' would be."""
    x, y = problem.x.double(), problem.y.double()
    theta, eye = x.new_zeros(x.shape[1]), torch.eye(x.shape[1]).double()
    for _ in range(30):
        p = torch.sigmoid(x @ theta)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + eye
        theta = theta - torch.linalg.solve(hessian, x.T @ (p - y) + theta)
    normal = torch.distributions.MultivariateNormal(theta, precision_matrix=hessian)
    torch.manual_seed(0)
    draws = normal.sample((4, 2000))
    p = torch.sigmoid(draws @ problem.test_x.double().T)
    moments = {"p_mean": p.mean((0, 1)).numpy(), "p_sd": p.std((0, 1)).numpy()}
    np.savez(path, draws=draws.numpy(), **moments)
    return draws


@pytest.mark.full
def test_a_table(data_root, problem, tmp_path):
    write_truth(tmp_path / "logistic-truth.npz", problem)
    options = ("--data-root", data_root, "--only", "logistic", "--rows", 1000)
    options += ("--passes", 50, "--method", "hmcecs", "sgld")
    printed, found = run_experiment("bias.table", tmp_path, *options)
    lines = found["logistic"]
    assert [line["method"] for line in lines] == ["hmcecs"] * 6 + ["sgld"] * 6
    # Its step size is small enough, and its draws nearly independent.
    best = lines[1]
    assert best["step"] == 0.2
    assert best["batch_size"] == 100
    assert abs(best["sd_error"][0]) < 4 * best["sd_error"][1] + 2
    # Of SGLD's three steps the longest is the hottest.
    mean, half = lines[8]["kinetic"]
    assert mean - half > lines[6]["kinetic"][0] > 1
    assert printed.count("| SGLD |") == 2 * 6
    assert (tmp_path / "logistic.png").exists()


def test_data_for_the_truth(data_root, tmp_path):
    options = ["--data-root", data_root, "--out", tmp_path, "--write-data"]
    run_example("bias.table", *options, "--rows", "500")
    for name, columns in (("logistic", None), ("network", 10)):
        data = np.load(tmp_path / f"{name}-data.npz")
        assert data["x"].shape[0] == len(data["y"]) == 500
        assert columns in (None, data["x"].shape[1])
        assert set(np.unique(data["y"])) == {0, 1}
        assert data["test_x"].shape == (2000, data["x"].shape[1])
