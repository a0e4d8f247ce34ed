"""The SGHMC paper's figure 4, and the bouncy particle on it, as a user runs them."""

import numpy as np
import pytest
import torch
from harness.examples import run_experiment
from sghmc2014.bnn.data import load_digits
from sghmc2014.bnn.methods import METHODS, build_model
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
