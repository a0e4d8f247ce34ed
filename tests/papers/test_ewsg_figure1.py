"""The EWSG figure's example: its numbers, with wrong samplers that they would show.

False alarms: z-tests by ``harness.statistics``; other bounds lie at least six standard
errors from what a right sampler gives, at fixed seeds.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ewsg2021.gaussian.chains import METHODS, Chains, Method
from ewsg2021.gaussian.errors import error_orders, run_pairs
from ewsg2021.gaussian.exact import linear_errors
from ewsg2021.gaussian.learning import learning_curves
from ewsg2021.gaussian.target import Gaussian, fitted_kl, floor, negentropy
from harness.examples import run_experiment
from harness.statistics import StatisticalError, check_mean, check_z

import torch_sgmcmc.samplers.ewsg

TARGET = Gaussian.draw(0)
GAMMA = 10.0


def test_the_floor_matches_exact_draws():
    g = torch.Generator().manual_seed(1)
    kl = [fitted_kl(TARGET.whiten(TARGET.sample(1000, g))) for _ in range(1000)]
    mean, quantile = floor(1000)
    check_mean(np.array(kl), mean, label="KL of exact draws")
    beyond = np.mean(np.array(kl) > quantile)
    check_z({"beyond": (beyond - 0.025) / (0.025 * 0.975 / 1000) ** 0.5}, label="KL")


def test_negentropy():
    g = torch.Generator().manual_seed(2)
    normal = torch.randn(20_000, 2, generator=g, dtype=torch.float64)
    skew = torch.tensor([[1.0, 0.7], [0.0, 2.0]], dtype=torch.float64)
    assert negentropy(normal @ skew) < 3e-4
    # Two independent exponentials: cumulants 2 and 6, 2 (4 / 12 + 36 / 48).
    exponential = torch.empty(400_000, 2, dtype=torch.float64)
    exponential.exponential_(generator=g)
    assert negentropy(exponential @ skew) == pytest.approx(13 / 6, rel=0.15)


def curves(**methods):
    return learning_curves(TARGET, methods, chains=4000, passes=30, seeds=range(2))


def check_order(seeds):
    """EWSG far below SGHMC, at the same number of gradients."""
    for one, two in zip(seeds["ewsg"]["kl"], seeds["sghmc"]["kl"], strict=True):
        assert one[-1] < 0.5 * two[-1]


@pytest.mark.full
def test_ewsg_is_below_sghmc_at_equal_budget():
    results = curves(ewsg=METHODS["EWSG"], sghmc=METHODS["SGHMC"])
    check_order(results)
    for row in results.values():
        assert row["passes"][0] == 0
        assert row["passes"][-1] == 30
        assert len(row["kl"][0]) == len(row["passes"])


def test_wrong_weights_are_not(monkeypatch):
    right = torch_sgmcmc.samplers.ewsg.ewsg_log_ratio

    def wrong(*args, **settings):
        return -right(*args, **settings)

    monkeypatch.setattr(torch_sgmcmc.samplers.ewsg, "ewsg_log_ratio", wrong)
    with pytest.raises(AssertionError):
        check_order(curves(ewsg=METHODS["EWSG"], sghmc=METHODS["SGHMC"]))


@pytest.mark.parametrize(
    ("method", "steps", "used"),
    [
        (METHODS["EWSG"], 10, 20),
        (replace(METHODS["EWSG"], length=4), 10, 50),
        (METHODS["SGHMC"], 10, 10),
        (METHODS["pSGLD"], 10, 10),
        (METHODS["SVRG-LD"], 25, 25 + 2 * 20),
        (METHODS["EWSG, SVRG"], 25, 2 * 25 + 2 * 20),
    ],
)
def test_gradients_are_counted(method, steps, used):
    run = Chains(TARGET, method, torch.zeros(3, 2, dtype=torch.float64), seed=0)
    for _ in range(steps):
        run.step()
    assert run.gradients == used


def test_the_integrator_of_the_paper():
    """θ moves with the old momentum, and momenta by the gradient at the old θ."""
    h, n = 0.05, TARGET.num_data
    run = Chains(TARGET, Method("sghmc", h, GAMMA, euler=True), TARGET.data[:3], 0)
    run.sampler.param_groups[0]["temperature"] = 0.0
    run.step()
    for _ in range(4):
        state = run.sampler.state[run.parameter]
        theta, v = run.theta.clone(), state["momentum"].clone()
        run.step()
        gradient = n * (theta - TARGET.data[run.index])
        torch.testing.assert_close(run.theta, theta + v)
        expected = (1 - GAMMA * h) * v - h**2 * gradient
        torch.testing.assert_close(state["momentum"], expected)


def simulated(steps, h):
    """Squared errors of SGHMC's time averages, one for each chain."""
    g = torch.Generator().manual_seed(3)
    start = TARGET.sample(20_000, g)
    run = Chains(TARGET, Method("sghmc", h, GAMMA), start, seed=4)
    total = torch.zeros(len(start), dtype=torch.float64)
    for _ in range(steps):
        run.step()
        total += (run.theta - TARGET.mean).square().sum(dim=1)
    return ((total / steps - TARGET.dim / TARGET.num_data) ** 2).numpy()


def test_exact_errors_equal_those_of_chains():
    h, steps = 1 / 16, 24
    squares = simulated(steps, h)

    def check(kind):
        errors, _ = linear_errors(TARGET, h, GAMMA, [steps * h], kind)
        check_mean(squares, errors[steps * h], label=kind)

    check("SGHMC")
    for wrong in ("full gradient", "linearised"):
        with pytest.raises(StatisticalError):
            check(wrong)


def test_exact_bias_is_the_closed_form():
    """θ is an autoregression of order two."""
    h, n = 0.05, TARGET.num_data
    alpha, eta = GAMMA * h, h * h
    for kind, sigma in (
        ("full gradient", np.zeros(2)),
        ("SGHMC", TARGET.gradient_covariance.diag().numpy()),
    ):
        s2 = 2 * alpha * eta + eta**2 * sigma
        variance = (2 - alpha) * s2 / (alpha * eta * n * (4 - 2 * alpha - eta * n))
        _, bias = linear_errors(TARGET, h, GAMMA, [h], kind)
        assert bias == pytest.approx(variance.sum() - 2 / n, rel=1e-9)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of these tests' pairs."""
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def orders(kept):
    times = [1.0, 2.0, 4.0, 8.0]
    runs = [
        run_pairs(TARGET, 2.0**-e, times, chains=400, seed=e, folder=kept)
        for e in (4, 8, 9)
    ]
    return error_orders(TARGET, runs)


def test_twins_follow_their_exact_law(orders):
    z = {str(row["step"]): np.array(row["twin_z"]) for row in orders["error_steps"]}
    check_z(z, label="twins")
    smallest = orders["error_steps"][0]
    assert smallest["step"] == 2**-9
    assert min(smallest["noise_reduction"]) > 5


def test_bias_of_ewsg(orders):
    """Below zero for small h and near first order, above SGHMC's sign at large h."""
    bias = orders["l"]
    low, high = bias["measured_over_first_order"][0]["interval"]
    assert 0.65 < low < high < 1  # measured: 0.827 ± 0.013
    assert bias["bias"][0]["interval"][1] < 0 < bias["bias"][-1]["interval"][0]
    assert all(b > 0 for b in bias["sghmc_bias"])
    assert bias["sghmc"]["slope_all_steps"]["value"] == pytest.approx(2, abs=0.05)
    assert orders["k"]["sghmc_excess"][0] > 0 > orders["k"]["excess"][0]["value"]


def test_slope_against_time(orders):
    small, large = orders["j"][0], orders["j"][-1]
    low, high = small["slope"]["interval"]
    assert -1.1 < low < high < -0.85
    assert large["slope"]["value"] > -0.6  # the floor of h = 1/16
    assert small["slope_continuous"] == pytest.approx(-0.958, abs=0.001)


def test_everything_is_reported(kept, monkeypatch):
    """Pairs for three step sizes exist, unless this test runs alone."""
    for name, few in {
        **{"STEPS": (0.02, 0.08), "LENGTHS": (0, 1, 4), "LENGTHS_ELSEWHERE": (4,)},
        **{"DATA_SIZES": (20, 25), "LONGER": (0, 1, 4), "STEPS_BY_KIND": (0.02, 0.05)},
    }.items():
        monkeypatch.setattr(f"ewsg2021.figure1.{name}", few)
    options = "--chains 100 --passes 3 --seeds 2 --other-data 2 --error-chains 400"
    options += " --smallest-step 9 --longest-time 3 --length-seeds 2"
    printed, found = run_experiment("ewsg2021.figure1", kept, *options.split())
    panels = ("a", "b", "c", "i")
    for panel in (*(f"Panel {p}" for p in panels), "Panels f to h", "Panels j, k, l"):
        assert panel in printed
    assert {f.stem for f in kept.glob("*.png")} == {"kl", "errors", "lengths"}
    names = ["fresh 0", "fresh 1", "fresh 4", "persistent 1", "persistent 4"]
    for n in ("20", "25"):
        assert list(found["lengths"]["fgh"][n]) == names
        assert list(found["lengths"]["i"][n]) == names
    kl, errors = found["kl"], found["errors"]
    assert list(kl["a"]) == list(METHODS) and list(kl["e"]) == list(kl["d"])
    for row in (*kl["a"].values(), *kl["c"].values()):
        assert len(row["kl"]) == 2 and all(np.isfinite(row["kl"][0]))
    assert len(kl["other_data"]["EWSG"]) == 2
    for points in kl["b"].values():
        taus = [p["tau_steps"] for p in points]
        assert taus[0] > 2 * taus[-1]
    for panel in "kl":
        assert errors[panel]["steps"] == [2.0**-e for e in range(9, 3, -1)]
        low, high = errors[panel]["slope"]["interval"]
        assert low <= high
