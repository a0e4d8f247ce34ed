"""The figures of the SBPS paper, at a tiny size and against what is known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import torch_sgmcmc as sg

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "python"))

import sbps_figures
from sbps_toys import comparison, paths
from sbps_toys.exact import LipschitzBPS
from sbps_toys.figure4 import METHODS
from sbps_toys.logistic import Array, Problem, simulate
from sbps_toys.methods import chains

pytestmark = pytest.mark.examples


@pytest.fixture(scope="module")
def problem() -> Problem:
    return simulate(20, seed=0)


def run_tiny(figure: int, out: Path) -> dict[str, Any]:
    arguments = ["--tiny", "--figure", str(figure), "--out", str(out)]
    sbps_figures.main(arguments)
    picture = out / f"figure{figure}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "results.json").read_text())[f"figure_{figure}"]
    result.pop("cpu_seconds", None)
    return result


@pytest.mark.parametrize("figure", sorted(sbps_figures.FIGURES))
def test_the_example_reports_numbers_and_pictures(
    figure: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_tiny(figure, tmp_path / "first")
    assert f"\nFigure {figure}\n\n| " in capsys.readouterr().out
    # One seed, one result; and finished runs are not made again.
    runs = tmp_path / "first" / "runs"
    made = {file: file.stat().st_mtime_ns for file in runs.iterdir()}
    assert made
    for file in list(made)[::2]:
        file.unlink()
    assert run_tiny(figure, tmp_path / "first") == first
    for file in list(made)[1::2]:
        assert file.stat().st_mtime_ns == made[file]


# ---- Trajectories ----------------------------------------------------------------


def test_the_corners_are_those_of_the_trajectory(problem: Problem) -> None:
    """It has unit speed, and passes where the sampler's own samples are."""
    start = problem.laplace_draws(1, seed=0)[0]
    path = paths.bounce(problem, start, 300, seed=4)
    lengths = np.linalg.norm(np.diff(path.corners, axis=0), axis=1)
    np.testing.assert_allclose(lengths, np.diff(path.times), atol=1e-9)

    w = torch.nn.Parameter(torch.from_numpy(start.copy()))
    interval = path.times[-1] / 40
    sampler = sg.SBPS([w], num_data=1000, seed=4, sample_interval=interval)
    samples: list[Array] = []
    sampler.register_sample_hook(
        lambda sampler, time: samples.append(w.detach().numpy().copy())
    )
    batches = paths.minibatches(problem, 1, seed=4)

    def closure() -> torch.Tensor:
        x, y = next(batches)
        return F.binary_cross_entropy_with_logits(x[0] @ w, y[0], reduction="none")

    for _ in range(300):
        sampler.step(closure)
    np.testing.assert_allclose(path.samples(40)[:39], samples[:39], atol=1e-9)


def test_each_chain_has_its_own_minibatches(problem: Problem) -> None:
    """At temperature 0 a step of SGLD is a step along the minibatch's mean gradient."""
    start = problem.laplace_draws(3, seed=0)
    samples = paths.run_gradient(
        problem, sg.SGLD, start, 1, 7, label="", lr=0.5, temperature=0.0
    )
    x, y = next(paths.minibatches(problem, 3, 7))
    assert len(x.unique(dim=0)) == 3
    for w, moved, rows, labels in zip(start, samples, x, y, strict=True):
        small = Problem(rows.numpy(), labels.numpy())
        expected = w - 0.5 * small.gradient(w) / len(rows)
        np.testing.assert_allclose(moved[0], expected, rtol=1e-12)


def test_an_exact_sampler_is_seen_after_every_minibatch_of_proposals(
    problem: Problem,
) -> None:
    start = problem.laplace_draws(2, seed=0)
    samples = paths.run_exact(problem, LipschitzBPS, start, 3, 7, label="")
    sampler = LipschitzBPS(problem, start, 7)
    for k in range(3):
        sampler.advance(100)
        np.testing.assert_array_equal(samples[:, k], sampler.position)


# ---- What is measured ------------------------------------------------------------


def test_autocorrelations_of_a_known_chain() -> None:
    random = np.random.default_rng(0)
    values = np.zeros(200_000)
    noise = random.standard_normal(len(values))
    for i in range(1, len(values)):
        values[i] = 0.8 * values[i - 1] + noise[i]
    found = paths.autocorrelation(values + 3, 6, 3.0)
    np.testing.assert_allclose(found, 0.8 ** np.arange(6), atol=0.02)
    expected = len(values) * (1 - 0.8) / (1 + 0.8)
    assert paths.effective_size(values) == pytest.approx(expected, rel=0.1)


def test_measures_of_independent_draws() -> None:
    """All are 1, and the effective size their number; others where draws are wrong."""
    random = np.random.default_rng(1)
    deviations = np.array([2.0, 0.1])
    reference = comparison.Reference(
        np.empty((1, 20)), np.array([1.0, 0.0]), deviations**2, 0.0
    )
    extremes = reference.mean + deviations * random.standard_normal((2, 4000, 2))
    runs = {"epochs": np.arange(1, 4001) / 10, "excess": np.linspace(99, 0, 4000)}
    first = {key: np.tile(value, (2, 1)) for key, value in runs.items()}

    def measured(extremes: Array) -> dict[str, Any]:
        later = {"excess": np.full((2, 9), 7.0), "extremes": extremes}
        return comparison.measure(first, later, reference, 400)

    right = measured(extremes)
    np.testing.assert_allclose(right["variance_ratio"], 1, atol=0.1)
    np.testing.assert_allclose(right["jump"], 1, atol=0.1)
    np.testing.assert_allclose(right["effective_size"], 1000, rtol=0.15)
    assert right["excess"] == [7.0, 7.0]
    # U falls below 10 + 2 √10 at this share of 400 epochs.
    near = 400 * (1 - (10 + 2 * 10**0.5) / 99)
    assert right["epochs_to_posterior"] == pytest.approx([near, near], abs=0.2)
    slow = measured(np.repeat(extremes[:, ::400], 400, axis=1))
    assert np.all(np.array(slow["jump"]) < 0.7)
    shifted = measured(extremes + deviations)
    np.testing.assert_allclose(shifted["variance_ratio"], 2, atol=0.2)


def test_the_finding_of_figure_4(problem: Problem) -> None:
    """SBPS comes near faster than the exact samplers and than SGLD with small steps."""
    start = problem.laplace_draws(3, seed=1, scale=10.0)
    low = problem.energy(problem.mode)
    excess = {}
    for name in ("SBPS", "SGLD 0.1", "SGLD 0.01", "lipSBPS", "ZZ-SS"):
        _, samples, _ = chains(problem, METHODS[name], start, 30, 0, name)
        excess[name] = (problem.energy(samples[:, -50:]) - low).mean()
    begin = (problem.energy(start) - low).mean()
    assert excess["SBPS"] < 0.4 * begin
    assert excess["SGLD 0.1"] < 0.5 * begin
    for slow in ("SGLD 0.01", "lipSBPS", "ZZ-SS"):
        assert 0.6 * begin < excess[slow] < begin
