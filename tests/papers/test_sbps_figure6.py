"""SBPS's figure 6 as a user runs it: data, reference, budgets, scores, resuming."""

import pytest
import torch
from harness.examples import run_experiment
from sbps2017.mnist7.chains import ChainConfig, _Chain, run_chain
from sbps2017.mnist7.data import load_digits4

IMAGES = 563  # training images of scikit-learn's digits 0 to 3
BATCH = 50


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Two step sizes, SBPS with two k, two seeds: what was printed and the runs."""
    out = tmp_path_factory.mktemp("everything")
    options = ("--digits", "--draws", 10, "--batch-size", BATCH)
    options += ("--epochs", 30, "--seeds", 2, "--lr", 0.1, 1, "--num_std", 3, 5)
    printed, found = run_experiment("sbps2017.figure6", out, *options)
    return out, printed, found["runs"]


def test_every_run_has_the_same_budget(everything):
    out, _, runs = everything
    methods = [r["config"]["method"] for r in runs]
    assert methods == ["sgld"] * 4 + ["sbps"] * 4
    budget = 30 * IMAGES
    for r in runs:
        config = r["config"]
        name = f"{config['method']}-{config['setting']:g}"
        if config["method"] == "sbps":
            name += f"-k{config['num_std']:g}"
        saved = torch.load(out / f"{name}-seed{config['seed']}.pt", weights_only=True)
        (group,) = saved["sampler"]["param_groups"]
        assert group["prior_precision"] == 0.002
        assert group["num_data"] == IMAGES
        if config["method"] == "sbps":
            assert group["num_std"] == config["num_std"]
            gradients = BATCH * group["num_bounces"]
            assert 0 <= group["num_derivatives"] + gradients - budget < 2 * BATCH
            assert len(saved["costs"]) == int(group["trajectory_time"] / 0.5)
        else:
            assert 0 <= saved["costs"][-1] - budget < BATCH
            assert len(saved["costs"]) == 30
        assert r["samples"] == sum(cost > budget / 2 for cost in saved["costs"])
    # Seeds differ, and so do step sizes.
    assert len({tuple(r["variance"]) for r in runs}) == len(runs)


def test_table_and_picture(everything):
    out, printed, _ = everything
    for name in ("SGLD, lr 0.1", "SGLD, lr 1", "SBPS, k = 5, rate 0"):
        assert printed.count(f"| {name} |") == 1
        assert printed.count(f"| {name}, widest |") == 1
    assert "digits 4x4, N 563, d 64, 30 epochs, 15 burn-in" in printed
    assert (out / "figure6.png").exists()


def test_an_interrupted_run_continues_to_the_same_bits(
    everything, tmp_path, monkeypatch
):
    images = load_digits4()
    advance, calls = _Chain.advance, []

    def advance_and_stop(self, epochs):
        calls.append(epochs)
        if len(calls) == 15:
            raise KeyboardInterrupt
        advance(self, epochs)

    config = ChainConfig("sbps", 0.0, 0, 30, BATCH, images.name)
    with monkeypatch.context() as patch:
        patch.setattr(_Chain, "advance", advance_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run_chain(config, images, tmp_path)
    resumed = run_chain(config, images, tmp_path)
    whole = torch.load(everything[0] / f"{config.name}.pt", weights_only=True)
    assert resumed["costs"] == whole["costs"]
    assert torch.equal(resumed["samples"], whole["samples"])
    # A shorter run is the beginning of it, and needs no more work.
    short = ChainConfig("sbps", 0.0, 0, 15, BATCH, images.name)
    half = run_chain(short, images, tmp_path)
    assert max(half["costs"]) < 15 * IMAGES + 2 * BATCH < max(whole["costs"])
    assert torch.equal(half["samples"], whole["samples"][: len(half["samples"])])
    other = ChainConfig("sbps", 0.0, 0, 30, 2 * BATCH, images.name)
    with pytest.raises(SystemExit, match="holds a run with other settings"):
        run_chain(other, images, tmp_path)
