"""The simulated scenarios of the SGHMC paper, at a tiny size and against theory."""

import numpy as np
import pytest
from harness.examples import run_experiment
from scipy import linalg
from sghmc2014.toys import correlated, double_well, phase_space

# Thresholds in standard errors; a right program fails one with probability 6e-5.
SIGMAS = 4.0


@pytest.mark.full
def test_tables_pictures_and_the_papers_finding(tmp_path):
    printed, found = run_experiment("sghmc2014.figures", tmp_path, "--tiny")
    for figure in ("figure1", "figure2", "figure3"):
        assert f"\n{figure}\n" in printed and (tmp_path / f"{figure}.png").exists()
    scores = {k: v[0] for k, v in found["figure1"]["scores"].items()}
    naive = scores.pop("naive SGHMC, no MH")
    # All are right but this one, and by far.
    for score in scores.values():
        clear = np.hypot(score["total_variation_error"], naive["total_variation_error"])
        assert naive["total_variation"] - score["total_variation"] > SIGMAS * clear
    assert scores["HMC, with MH"]["acceptance"] > 0.98
    assert 0.4 < scores["naive SGHMC, with MH"]["acceptance"] < 0.7
    assert scores["HMC, no MH"]["acceptance"] is None


def test_the_second_moments_of_figure_1():
    size = double_well.Size(chains=1500, burn_in=8, trajectories=12)
    for method in ("HMC, with MH", "SGHMC"):
        score = double_well.score(double_well.run(method, size, seed=1)["samples"])
        z = score["second_moment"] - double_well.moment(2)
        # SGHMC's own bias at ε = 0.1 is below 0.01.
        bias = 0.0 if method == "HMC, with MH" else 0.01
        assert abs(z) < SIGMAS * score["second_moment_error"] + bias


def leapfrog_variance():
    """Var(θ) over trajectories of 50 noisy steps with fresh momenta, exactly."""
    eps, noise = phase_space.STEP_SIZE, phase_space.NOISE
    kick = np.array([[1.0, 0.0], [-eps, 1.0]])
    half = np.array([[1.0, 0.0], [-eps / 2, 1.0]])
    drift = np.array([[1.0, eps], [0.0, 1.0]])
    added = np.diag([0.0, eps**2 * noise])
    # Covariances are linear in the start's: find the fixed point of θ's.

    def trajectory(variance):
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


def test_the_energies_of_figure_2():
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


@pytest.mark.parametrize("label", ["SGLD", "SGLD with β̂", "SGHMC"])
def test_figure_3_follows_the_exact_law(label):
    point = correlated.simulate(label, 0, 400, 2500, 300, seed=2)
    exact = correlated.law(*correlated.SETTINGS[label][0])
    tau = exact["autocorrelation_time"]
    # A relative error of a covariance is about √(2 · 2τ / samples).
    error = 2 * np.sqrt(4 * tau / point["samples"])
    assert abs(point["error"] - exact["error"]) < SIGMAS * error
    assert abs(point["autocorrelation_time"] / tau - 1) < 0.15
    assert abs(point["authors_time"] / exact["authors_time"] - 1) < 0.15


def test_the_exact_law_of_figure_3():
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


def test_the_exact_errors_of_figure_3_with_the_noise_estimate():
    """SGLD's with β̂, in closed form: variances 2 lr / (2 lr h - lr² h²)."""
    errors = []
    for lr, _ in correlated.SETTINGS["SGLD"]:
        curvatures = linalg.eigvalsh(np.linalg.inv(correlated.SIGMA))
        variances = 2 / (2 * curvatures - lr * curvatures**2)
        entries = [variances.sum() / 2, (variances[0] - variances[1]) / 2]
        errors.append((abs(entries[0] - 1) + abs(entries[1] - 0.9)) / 2)
        law = correlated.law(lr, 1.0)
        assert law["error"] == pytest.approx(errors[-1], rel=1e-9)
    assert errors[0] == pytest.approx(0.450, abs=5e-4)
    assert errors[-1] == pytest.approx(0.029, abs=5e-4)


def test_the_authors_sum_ends_at_the_first_small_correlation():
    correlations = [1.0, 0.5, 0.2, 0.04, 0.9]
    found = correlated.authors_time(correlations, length=10)
    assert found == pytest.approx(1 + 2 * (0.9 * 0.5 + 0.8 * 0.2))
