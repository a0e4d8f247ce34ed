"""EWSG's figure 3 as a user runs it: equal budgets, learning, resuming, diagnostics."""

import pytest
import torch
from ewsg2021.ensemble.chain import NetworkChain
from ewsg2021.ensemble.methods import PAPER, build_sampler
from ewsg2021.ensemble.models import build_model
from harness.examples import run_experiment
from sghmc2014.bnn.data import load_digits

import torch_sgmcmc as sg

METHODS = ["ewsg", "sghmc", "cp_sghmc", "sgld", "psgld"]
IMAGES = 1400  # training images of the digits, with the validation images


def run(out, *options):
    common = ("--digits", "--seeds", 1, "--batch-size", 50)
    return run_experiment("ewsg2021.mnist", out, *common, *options)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """All methods with two seeds and two chains: what was printed and found."""
    out = tmp_path_factory.mktemp("everything")
    options = ("--passes", 2, "--burn-in", 1, "--chains", 2, "--seeds", 2)
    return out, *run(out, *options, "--samples-per-pass", 2)


def test_every_method_takes_the_same_number_of_gradients(everything):
    runs = everything[2]["runs"]
    assert [r["config"]["method"] for r in runs] == [m for m in METHODS for _ in "01"]
    for r in runs:
        taken = [entry["gradients"] for entry in r["history"]]
        assert taken == [2 * IMAGES * half // 2 for half in range(1, 5)]
        assert r["samples"] == 4  # two of each chain, after burn-in


def test_predictions_are_the_mean_of_the_draws_of_all_chains(everything):
    images = load_digits()
    model = build_model("mlp", 64, seed=1)
    for r in everything[2]["runs"]:
        config = r["config"]
        name = f"mlp-{config['method']}-seed{config['seed']}"
        draws = sg.SampleStore(everything[0] / name)
        assert [d.chain for d in draws] == [0, 0, 1, 1]
        mean = sg.predict(model, draws, images.test_x).mean
        right = mean.gather(1, images.test_y[:, None]).double()
        assert -right.log().mean().item() == pytest.approx(r["final"]["nll"], abs=1e-6)
        # Of one chain alone they are others.
        alone = sg.predict(model, draws.chain(0), images.test_x).mean
        assert (alone - mean).abs().max() > 1e-4


def test_table_and_picture(everything):
    out, printed, _ = everything
    for label in ("EWSG", "SGHMC", "CP-SGHMC", "SGLD", "pSGLD"):
        assert printed.count(f"| {label} |") == (1 if label == "EWSG" else 2)
    assert (out / "learning.png").exists()


def test_the_cnn_learns(tmp_path):
    options = ("--method", "ewsg", "--model", "cnn", "--passes", 4, "--burn-in", 4)
    (r,) = run(tmp_path, *options, "--h", 4e-3, "--gamma", 25)[1]["runs"]
    assert r["config"]["model"] == "cnn"
    assert r["final"]["error"] < 0.3


@pytest.mark.parametrize("method", ["ewsg", "psgld"])
def test_an_interrupted_run_continues_to_the_same_bits(tmp_path, method, monkeypatch):
    options = ("--method", method, "--passes", "4", "--burn-in", "1", "--chains", "2")
    interrupted = tmp_path / "interrupted"
    (whole,) = run(tmp_path / "whole", *options)[1]["runs"]

    train = NetworkChain.train
    calls = []

    def train_and_stop(self):
        train(self)
        calls.append(None)
        if len(calls) == 5:  # the first chain has made its third pass
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NetworkChain, "train", train_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run(interrupted, *options)
    assert not (interrupted / "results.json").exists()

    (resumed,) = run(interrupted, *options)[1]["runs"]
    for key in ("digest", "history", "samples", "diagnostics"):
        assert resumed[key] == whole[key]


def test_the_papers_step_sizes_in_ours():
    model = torch.nn.Linear(2, 2)
    at_h, at_quarter = (
        {"lr": 1.6e-5, "momentum": 1 - 4e-4},
        {"lr": 4e-6, "momentum": 1 - 2e-4},
    )
    expected = {"ewsg": at_h, "sghmc_at_h": at_h, "sgld": {"lr": 6e-3}}
    expected |= {"sghmc": at_quarter, "cp_sghmc": at_quarter, "psgld": {"lr": 1e-4}}
    for method, numbers in expected.items():
        sampler = build_sampler(method, PAPER["mlp"][method], model, 60_000, seed=0)
        (group,) = sampler.param_groups
        assert group["prior_precision"] == 1.0
        assert {key: group[key] for key in numbers} == pytest.approx(numbers)
