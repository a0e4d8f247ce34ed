"""The simulated scenarios of the SGHMC paper, at a tiny size and against theory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.examples import PAPERS, run_example
from scipy import linalg
from sghmc2014.toys import correlated, double_well, phase_space

pytestmark = pytest.mark.examples

# Thresholds in standard errors; a right program fails one with probability 6e-5.
SIGMAS = 4.0


@pytest.mark.slow
def test_the_example_reports_numbers_and_pictures(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(PAPERS),
        "sghmc2014.figures",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    output = subprocess.run(
        [*command, "--tiny"], check=True, capture_output=True, text=True
    ).stdout
    for figure in (1, 2, 3):
        picture = tmp_path / f"figure{figure}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"\nFigure {figure}" in output
    numbers = json.loads((tmp_path / "results.json").read_text())
    scores = {k: v[0] for k, v in numbers["figure_1"]["scores"].items()}
    naive = scores.pop("naive SGHMC, no MH")
    # The paper's finding: all are right but this one, and by far.
    for score in scores.values():
        clear = np.hypot(score["total_variation_error"], naive["total_variation_error"])
        assert naive["total_variation"] - score["total_variation"] > SIGMAS * clear
    assert scores["HMC, with MH"]["acceptance"] > 0.98
    assert 0.4 < scores["naive SGHMC, with MH"]["acceptance"] < 0.7
    assert scores["HMC, no MH"]["acceptance"] is None
    # One seed, one result.
    again = tmp_path / "again"
    options = ("--threads", 1, "--out", again, "--tiny", "--figure", 2)
    run_example("sghmc2014.figures", *options)
    repeated = json.loads((again / "results.json").read_text())
    assert repeated["figure_2"] == numbers["figure_2"]


def test_the_second_moments_of_figure_1() -> None:
    size = double_well.Size(chains=1500, burn_in=8, trajectories=12)
    for method in ("HMC, with MH", "SGHMC"):
        score = double_well.score(double_well.run(method, size, seed=1)["samples"])
        z = score["second_moment"] - double_well.moment(2)
        # SGHMC's own bias at ε = 0.1 is below 0.01.
        bias = 0.0 if method == "HMC, with MH" else 0.01
        assert abs(z) < SIGMAS * score["second_moment_error"] + bias


def test_the_floor_is_what_exact_samples_show() -> None:
    random = np.random.default_rng(0)
    p = double_well.true_probabilities()
    assert abs(p.sum() - 1) < 1e-9
    centres = (double_well.EDGES[:-1] + double_well.EDGES[1:]) / 2
    samples = random.choice(centres, size=(50, 2000), p=p / p.sum())
    score = double_well.score(samples)
    assert abs(score["total_variation"] / score["floor"] - 1) < 0.3


def leapfrog_variance() -> float:
    """Var(θ) over trajectories of 50 noisy steps with fresh momenta, exactly."""
    eps, noise = phase_space.STEP_SIZE, phase_space.NOISE
    kick = np.array([[1.0, 0.0], [-eps, 1.0]])
    half = np.array([[1.0, 0.0], [-eps / 2, 1.0]])
    drift = np.array([[1.0, eps], [0.0, 1.0]])
    added = np.diag([0.0, eps**2 * noise])
    # Covariances are linear in the start's: find the fixed point of θ's.

    def trajectory(variance: float) -> list[np.ndarray]:
        cov = half @ np.diag([variance, 1.0]) @ half.T + added / 4
        covs = []
        for _ in range(phase_space.RESAMPLED):
            cov = drift @ cov @ drift.T
            covs.append(cov)
            cov = kick @ cov @ kick.T + added
        return covs

    base, slope = trajectory(0.0)[-1][0, 0], trajectory(1.0)[-1][0, 0]
    fixed = base / (1 - (slope - base))
    # What is compared leaves out the trajectory's two ends.
    return float(np.mean([c[0, 0] for c in trajectory(fixed)[:-1]]))


def test_the_energies_of_figure_2() -> None:
    results = {
        name: phase_space.summary(*phase_space.run(name, 2000, 256, seed=3))
        for name in phase_space.DYNAMICS
    }
    still, noisy, resampled, friction = (results[name] for name in phase_space.DYNAMICS)
    assert abs(still["energy_per_step"][0]) < 1e-5  # conserved, to ε²
    rate, error = noisy["energy_per_step"]
    assert abs(rate - phase_space.ENERGY_RATE) < SIGMAS * error
    assert rate > 10 * error
    variance, error = resampled["late_variance"]
    assert abs(variance - leapfrog_variance()) < SIGMAS * error
    assert variance > 1 + 10 * error  # not the target's
    variance, error = friction["late_variance"]
    assert abs(variance - 1) < SIGMAS * error + 0.01
    assert still["largest_radius"] < 5 < noisy["largest_radius"]


@pytest.mark.parametrize(("label", "index"), [("SGLD", 0), ("SGLD", 3), ("SGHMC", 0)])
def test_figure_3_follows_the_exact_law(label: str, index: int) -> None:
    point = correlated.simulate(label, index, 400, 2500, 300, seed=2)
    exact = correlated.law(*correlated.SETTINGS[label][index])
    tau = exact["autocorrelation_time"]
    # A relative error of a covariance is about √(2 · 2τ / samples).
    error = 2 * np.sqrt(4 * tau / point["samples"])
    assert abs(point["error"] - exact["error"]) < SIGMAS * error
    assert abs(point["autocorrelation_time"] / tau - 1) < 0.15


def test_the_exact_law_of_figure_3() -> None:
    """Against the scalar formulas: SGLD's variance along each axis of the target."""
    lr = 0.1
    curvatures = linalg.eigvalsh(np.linalg.inv(correlated.SIGMA))
    variances = (2 * lr + lr**2) / (2 * lr * curvatures - (lr * curvatures) ** 2)
    # Axes (1, 1) and (1, -1): the entries are half of the sum and of the difference.
    entries = [variances.sum() / 2, (variances[0] - variances[1]) / 2]
    expected = (abs(entries[0] - 1) + abs(entries[1] - 0.9)) / 2
    law = correlated.law(lr, None)
    assert law["error"] == pytest.approx(expected, rel=1e-10)
    weights = variances / variances.sum()
    tau = (weights / (lr * curvatures)).sum()
    assert law["autocorrelation_time"] == pytest.approx(tau, rel=1e-10)
