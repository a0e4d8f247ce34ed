"""bias.table: its errors, a short table, and going on with it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.examples import run_example

pytestmark = pytest.mark.examples


def laplace(x: torch.Tensor, y: torch.Tensor, draws: int) -> torch.Tensor:
    """Draws of a normal approximation, in four chains."""
    x, y = x.double(), y.double()
    theta, eye = x.new_zeros(x.shape[1]), torch.eye(x.shape[1]).double()
    for _ in range(30):
        p = torch.sigmoid(x @ theta)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + eye
        theta = theta - torch.linalg.solve(hessian, x.T @ (p - y) + theta)
    normal = torch.distributions.MultivariateNormal(theta, precision_matrix=hessian)
    torch.manual_seed(0)
    return normal.sample((4, draws))


def write_truth(path: Path, problem: Any) -> torch.Tensor:
    import numpy as np

    draws = laplace(problem.x, problem.y, 2000)
    p = torch.sigmoid(draws @ problem.test_x.double().T)
    moments = {"p_mean": p.mean((0, 1)).numpy(), "p_sd": p.std((0, 1)).numpy()}
    np.savez(path, draws=draws.numpy(), **moments)
    return draws


def test_errors_of_known_draws(data_root: Path, tmp_path: Path) -> None:
    problems = importlib.import_module("bias.problems")
    run = importlib.import_module("bias.run")
    problem = problems.load("logistic", data_root, 1000)
    draws = write_truth(tmp_path / "truth.npz", problem)
    truth = run.Truth(tmp_path / "truth.npz", problem)
    center = draws.mean((0, 1))
    wide = center + 1.1 * (draws - center) + 0.5 * draws.flatten(0, 1).std(0)
    p = torch.sigmoid(draws @ problem.test_x.double().T).mean(1)
    errors = run._errors(problem, truth, wide, p)
    assert errors["mean_error"][0] == pytest.approx(0.5, abs=1e-3)
    assert errors["sd_error"][0] == pytest.approx(10, abs=0.05)
    assert errors["variance"] == pytest.approx(1.21, abs=1e-3)
    # A chain's own predictions are a little worse than those of all.
    assert abs(errors["nll"][0]) < 0.5


def test_a_table_that_goes_on(data_root: Path, tmp_path: Path) -> None:
    problems = importlib.import_module("bias.problems")
    write_truth(
        tmp_path / "logistic-truth.npz", problems.load("logistic", data_root, 1000)
    )
    options = ["--data-root", str(data_root), "--problem", "logistic"]
    options += ["--rows", "1000", "--passes", "100", "--out", str(tmp_path)]

    printed = []

    def main(*more: str) -> list[dict[str, Any]]:
        printed.append(run_example("bias.table", *options, *more))
        return json.loads((tmp_path / "logistic.json").read_text())["lines"]

    first = main("--method", "hmcecs")
    assert len(first) == 6
    # Its step size is small enough, and its draws nearly independent.
    best = first[1]
    assert best["step"] == 0.2
    assert best["batch_size"] == 100
    assert abs(best["sd_error"][0]) < 4 * best["sd_error"][1] + 2
    both = main("--method", "hmcecs", "sgld")
    # What was there has not been made again, seconds included.
    assert both[:6] == first
    hottest = both[8]
    assert (hottest["method"], hottest["batch_size"]) == ("sgld", 100)
    mean, half = hottest["kinetic"]
    assert mean - half > both[6]["kinetic"][0] > 1
    assert "".join(printed).count("| SGLD |") == 6
    assert (tmp_path / "logistic.md").read_text().count("\n| ") == 14
    assert (tmp_path / "logistic.png").stat().st_size > 10_000


def test_data_for_the_truth(data_root: Path, tmp_path: Path) -> None:
    import numpy as np

    options = ["--data-root", str(data_root), "--out", str(tmp_path), "--write-data"]
    run_example("bias.table", *options, "--rows", "500")
    for name, columns in (("logistic", None), ("network", 10)):
        data = np.load(tmp_path / f"{name}-data.npz")
        assert data["x"].shape[0] == len(data["y"]) == 500
        assert columns in (None, data["x"].shape[1])
        assert set(np.unique(data["y"])) == {0, 1}
        assert data["test_x"].shape == (2000, data["x"].shape[1])
