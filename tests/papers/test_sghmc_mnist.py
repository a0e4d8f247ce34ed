"""The SGHMC paper's figure 4, and the bouncy particle on it, as a user runs them."""

import numpy as np
import pytest
import torch
from harness.examples import run_experiment
from scipy import linalg
from sghmc2014.bnn.bouncy import BouncyChain
from sghmc2014.bnn.config import RunConfig
from sghmc2014.bnn.data import load_digits
from sghmc2014.bnn.methods import METHODS, build_model
from sghmc2014.bnn.pairs import difference
from sghmc2014.toys import correlated, double_well, phase_space
from stored_files import contents

import torch_sgmcmc as sg

IMAGES, MINIBATCH = 1200, 100  # the digits'


def example(out, *options):
    """Returns the report of a seed's runs on the digits."""
    common = ("--digits", "--seeds", 1)
    return run_experiment("sghmc2014.mnist", out, *common, *options)[1]["runs"]


def test_the_digits_are_learnt_by_all_methods(tmp_path):
    """Runs with the default settings, a seventh as long.

    With MNIST's minibatches SGHMC is no better than chance: nine in ten are wrong.
    """
    options = ("--digits", "--seeds", 1, "--epochs", 30, "--burn-in", 12)
    options += ("--method", *METHODS)
    printed, found = run_experiment("sghmc2014.mnist", tmp_path, *options)
    pictures = {f.stem for f in tmp_path.glob("*.png")}
    assert pictures == {"figure4", "uncertainty", "learning"}
    assert printed.count(" points | ") == 15, "each two methods"
    runs = {run["config"]["method"]: run for run in found["runs"]}
    assert list(runs) == list(METHODS)
    assert len({run["digest"] for run in runs.values()}) == len(METHODS)
    images, model = load_digits(), build_model(64, 1, torch.device("cpu"))
    for method, run in runs.items():
        bouncy, point = method in ("sbps", "psbps"), method in ("sgd", "sgdm")
        assert run["config"]["batch_size"] == 100 and len(run["history"]) == 30
        assert run["final"]["error"] < (0.3 if bouncy else 0.1), method
        if point:
            assert run["samples"] == 0
            continue
        # What is reported is what the stored draws predict.
        draws = sg.SampleStore(tmp_path / f"{method}-seed0")
        mean = sg.predict(model, draws, images.test_x).mean
        right = mean.gather(1, images.test_y[:, None]).double()
        nll = -right.log().mean().item()
        assert nll == pytest.approx(run["final"]["nll"], abs=1e-6)
        if not bouncy:
            assert len(draws) == run["samples"] == 18
            continue
        # An epoch is N evaluations; each sample time after burn-in is a draw.
        for entry in run["history"]:
            budget = max(0, entry["epoch"] - 5) * IMAGES
            assert 0 <= entry["evaluations"] - budget < 2 * MINIBATCH
            assert entry["precisions"] == [1.0, 1.0]
        interval = run["config"]["settings"]["sample_interval"]
        begin, end = (run["history"][i]["trajectory_time"] for i in (11, 29))
        assert len(draws) == int(end / interval) - int(begin / interval) > 10
        assert run["final"]["bounces"] > 0


def test_mnist_itself(tmp_path, data_root):
    """Four epochs: far from converged, but learning and calibrated."""
    sizes = ("--method", "sghmc", "--epochs", 4, "--burn-in", 2, "--seeds", 1)
    data = ("--data-root", data_root)
    (run,) = run_experiment("sghmc2014.mnist", tmp_path, *data, *sizes)[1]["runs"]
    assert run["config"]["dataset"] == "MNIST"
    assert run["final"]["error"] < 0.09
    assert run["final"]["nll"] < 0.35
    assert all(p > 0 for p in run["final"]["precisions"])


def test_the_particle_starts_where_sgd_with_momentum_ends(tmp_path):
    common = ("--epochs", 3, "--burn-in", 2)
    (sgdm,) = example(tmp_path, "--method", "sgdm", *common)
    options = ("--method", "sbps", *common, "--start-epochs")
    (two,) = example(tmp_path / "two", *options, 2)
    (none,) = example(tmp_path / "none", *options, 0)
    first, same = ([r["nll"] for r in run["history"]][:2] for run in (two, sgdm))
    assert first == same
    assert two["final"]["nll"] != sgdm["final"]["nll"]
    assert none["history"][0]["nll"] != sgdm["history"][0]["nll"]


def test_a_fixed_precision(tmp_path):
    options = ("--epochs", 2, "--burn-in", 1, "--precision", 2.5)
    fixed = example(tmp_path, *options, "--method", "sghmc", "sbps")
    assert [r["config"]["settings"]["precision"] for r in fixed] == [2.5] * 2
    assert fixed[1]["final"]["precisions"] == [2.5, 2.5]
    # What fixed[0] had is in the sampler that the checkpoint keeps.
    state = torch.load(tmp_path / "sghmc-seed0.pt", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    assert [group["prior_precision"] for group in groups] == [2.5, 2.5]


@pytest.mark.parametrize("method", ["sghmc", "psbps"])
def test_a_resumed_run_has_the_same_bits(tmp_path, method):
    options = ("--method", method, "--burn-in", 2, "--epochs")
    if method == "psbps":
        options = ("--start-epochs", 1, "--draw-precision", *options)
    (whole,) = example(tmp_path / "whole", *options, 6)
    example(tmp_path / "parts", *options, 3)
    (resumed,) = example(tmp_path / "parts", *options, 6)
    for key in ("digest", "history", "samples"):
        assert whole[key] == resumed[key]
    assert all(p not in (0.0, 1.0) for p in whole["final"]["precisions"])
    stores = (tmp_path / out / f"{method}-seed0" for out in ("whole", "parts"))
    assert contents(next(stores)) == contents(next(stores))
    # Other settings in the same folder are another run.
    with pytest.raises(SystemExit, match="holds a run with other settings"):
        example(tmp_path / "parts", *options, 6, "--batch-size", 50)


def test_draws_are_the_networks_at_the_sample_times_after_burn_in(tmp_path):
    images = load_digits()
    settings = METHODS["sbps"] | {"start_epochs": 0, "sample_interval": 0.01}
    config = RunConfig("sbps", 0, tuple(settings.items()), 2, 1, 500, images.name)
    chain = BouncyChain(config, images, tmp_path / "store")
    kept = []
    chain._sampler.register_sample_hook(
        lambda sampler, time: kept.append([p.clone() for p in chain.parameters()])
    )
    chain.train(1)
    of_burn_in = len(kept)
    chain.train(2)
    (collector,) = chain.collectors
    collector.close()
    draws = sg.SampleStore(tmp_path / "store")
    assert 1 < len(draws) == len(kept) - of_burn_in < len(kept)
    for draw, expected in zip(draws, kept[of_burn_in:], strict=True):
        found = [draw[name] for name in chain.model.state_dict()]
        assert all(map(torch.equal, found, expected))


def test_images_are_compared_in_pairs_and_seeds_by_themselves():
    hard = np.arange(100) % 10 == 0  # for both methods
    assert difference(hard[None], hard[None]) == (0, 0, 0)
    mean, low, high = difference(hard[None] | (np.arange(100) < 50), hard[None])
    assert mean == pytest.approx(0.45)
    assert 0.3 < low < 0.4 and 0.5 < high < 0.6  # of binomial(100, 0.45)
    varies = np.array([[True] * 100, [False] * 100])
    assert difference(varies, ~varies) == (0, -1, 1)
    assert difference(varies, varies[1:]) == (0.5, 0, 1)


def test_two_settings_of_mnist_at_their_temperatures(data_root, tmp_path):
    """mnist_heat: short runs, of which no one is made twice."""
    options = ["--data-root", data_root, "--seeds", 1, "--epochs", 4, "--start", 1]
    options += ["--observe", 2, "--only", "page", "cool"]
    printed, found = run_experiment("sghmc2014.mnist_heat", tmp_path, *options)
    page, cool = found["runs"]
    heat = [r["temperatures"]["output weights"]["kinetic"] for r in (page, cool)]
    assert heat[0][0] - heat[0][1] > 1.5 > heat[1][0] + heat[1][1]
    assert page["error"] < 0.15
    # Of the whole layer's parameters, in one draw: the first layer's are tiny so far.
    assert page["precisions"][0] > 5 * page["precisions"][1]
    assert "\n| page | 0 | " in printed and "\n| cool | 0 | " in printed


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
