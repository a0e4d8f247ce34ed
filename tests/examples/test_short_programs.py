"""The short programs: what they print, store and draw."""

import functools
import re

import pytest
import stored_regression
import torch
from harness.examples import run_example
from stored_files import contents

import torch_sgmcmc as sg


def run(name, picture, *options):
    """Returns the output of a program that writes a picture into --out."""
    printed = run_example(name, "--out", picture.parent, *options)
    assert picture.read_bytes().startswith(b"\x89PNG")
    return printed


def test_a_coefficient_that_climbs(tmp_path, one_thread):
    """The coefficient is in 0 to 4: chains of 90 and 60 steps stay near w*."""
    picture = tmp_path / "local_learning_coefficient.png"
    options = ("--draws", 60, "--checkpoints", 2)
    printed = run("local_learning_coefficient", picture, *options)
    lines = re.findall(r"rank (\d), +([\d.]+): +([\d.-]+) ±", printed)
    assert [rank for rank, *_ in lines] == ["0", "4"]
    found = [float(value) for *_, value in lines]
    assert 0 < found[0] < 7.5 and 7.5 < found[1] < 18
    assert (tmp_path / "traces.png").exists()


def test_where_a_classifier_is_unsure(tmp_path, one_thread):
    printed = run("classification_uncertainty", tmp_path / "digits.png", "--epochs", 30)
    (error,) = re.findall(r"error ([\d.]+)%", printed)
    (area,) = re.findall(r"AUROC of turned images: ([\d.]+)", printed)
    assert float(error) < 20 and float(area) > 0.6  # far from converged, but learning
    assert len(sg.SampleStore(tmp_path / "draws").chains) == 3


@pytest.mark.parametrize("data", ["MNIST", "digits"])
def test_the_posterior_on_mnist(data, request, tmp_path):
    options = ["--digits", "--epochs", 40]
    if data == "MNIST":
        root = request.getfixturevalue("data_root")
        options = ["--data-root", root, "--epochs", 8]
    picture = tmp_path / "predictions.png"
    printed = run("mnist_bnn", picture, *options, "--burn-in", 2)
    draws = len(sg.SampleStore(tmp_path / "draws"))
    assert draws == (12 if data == "MNIST" else 76)
    assert "R-hat of log-probabilities: median 1." in printed
    assert f"\nposterior, {draws} draws:\n" in printed
    assert "\nlast draw, 1 draws:\n" in printed
    errors = [float(e) for e in re.findall(r"error ([\d.]+)%", printed)]
    assert len(errors) == 2 and errors[0] < 15  # far from converged, but learning
    areas = [float(a) for a in re.findall(r"(?:entropy|part): ([\d.]+)", printed)]
    assert len(areas) == 3 and min(areas) > 0.5
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert f"\n  {name} " in printed


def test_mnist_that_is_not_there(tmp_path):
    with pytest.raises(RuntimeError, match="Dataset not found"):
        run_example("mnist_bnn", "--data-root", tmp_path)


def test_methods_have_the_same_gradients(data_root, tmp_path, monkeypatch, one_thread):
    step, steps = torch.optim.SGD.step, []

    def counted(self, *arguments):
        steps.append(step(self, *arguments))

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    options = ("--data-root", data_root, "--images", 400, "--steps", 100)
    printed = run("cnn_cyclical", tmp_path / "cyclical.png", *options)
    assert len(steps) == 2 * 100  # one network, and five members
    draws = sg.SampleStore(tmp_path / "draws")
    sampling = [step for step in range(1, 101) if (step - 1) % 20 >= 10]
    assert [draw.step for draw in draws] == sampling
    rows = re.findall(r"^(\w+) +(\d+) +([\d.]+)%.* ([\d.]+)$", printed, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("SGD", "1"),
        ("ensemble", "5"),
        ("cyclical", str(len(draws))),
    ]
    assert all(float(error) < 80 and float(area) > 0.5 for _, _, error, area in rows)


def test_a_script_with_either_optimizer(data_root, tmp_path, one_thread):
    options = ("--data-root", data_root, "--images", 1000, "--epochs", 20)
    for optimizer in ("sgd", "sghmc"):
        picture = tmp_path / "swap.png"
        printed = run("swap_sgd", picture, "--optimizer", optimizer, *options)
        name, draws, error = re.findall(
            r"^(\w+), (\d+) networks: error ([\d.]+)%, NLL .*, ECE ", printed
        )[0]
        # Of the last three of five cycles of 40 steps, every third step at T > 0.
        assert (name, int(draws)) == (optimizer, 20 if optimizer == "sghmc" else 1)
        assert float(error) < 30  # far from converged, but learning
        assert (tmp_path / f"{optimizer}.pt").exists()


def test_adapters_alone_are_stored(tmp_path, one_thread):
    options = ("--epochs", 2, "--steps", 80)
    printed = run("transformer_lora", tmp_path / "lora.png", *options)
    store = sg.SampleStore(tmp_path / "draws")
    assert len(store[0]) == 16 and all("lora_" in name for name in store[0])
    assert sum(t.nbytes for t in store[0].values()) == 3072
    assert "A draw has 3,072 bytes, the network 19,352." in printed
    frozen, point, posterior = map(float, re.findall(r"NLL ([\d.]+)", printed))
    assert max(point, posterior) < frozen - 0.3


def test_how_groups_differ_is_sampled_right(tmp_path, one_thread):
    """Within four standard errors, of which one in 8,000 such programs is out."""
    picture = tmp_path / "hierarchical.png"
    printed = run("hierarchical", picture, "--steps", 800)
    found = re.findall(r"mean (-?[\d.]+)(?: ± ([\d.]+))?, sd ([\d.]+)", printed)
    for (mean, error, sd), (exact, _, exact_sd) in (found[:2], found[2:]):
        assert float(error) < 0.1
        assert abs(float(mean) - float(exact)) < 4 * float(error)
        assert 0.8 < float(sd) / float(exact_sd) < 1.25


def test_a_table_from_trained_networks(tmp_path, one_thread):
    """Networks together predict better than one, and draws of 600 steps than these."""
    printed = run("tabular_regression", tmp_path / "table.png", "--steps", 600)
    assert "8 chains of 50 draws" in printed and "\n400 draws: RMSE" in printed
    one, together, draws = map(float, re.findall(r"NLL (-?[\d.]+)", printed))
    assert draws < together < one - 1


def test_which_steps_become_draws(tmp_path, one_thread):
    printed = run("collected_steps", tmp_path / "collected.png", "--steps", 200)
    assert "40 draws of burn_in=40, every=4" in printed
    stores = [sg.SampleStore(tmp_path / f"draws-{i}") for i in range(3)]
    burn_in, cyclical, decaying = ([d.step for d in s] for s in stores)
    assert burn_in == list(range(44, 201, 4))
    # Of cycles of 60 steps the last 24.
    assert cyclical and all((step - 1) % 60 >= 36 for step in cyclical)
    assert decaying == list(range(4, 201, 4))
    assert all(draw.weight == pytest.approx(draw.lr) for draw in stores[2])


def test_points_that_grow_and_rest(tmp_path, one_thread):
    """Then the law is that of a sampler that was built with them.

    Of 29 weights and about 60 effective draws, the rms of the means' errors is 0.13 sd,
    the mean of the logarithms of variances 0.04 off; a band of three times that.
    """
    picture = tmp_path / "growing_points.png"
    printed = run("growing_points", picture, "--steps", 10_000)
    points, draws, off, *_, ratio = map(float, re.findall(r"\d+(?:\.\d+)?", printed))
    assert points > 15 and draws == 900
    assert off < 0.4 and 0.82 < ratio < 1.22


def test_a_regression_is_stored_and_gone_on_with(tmp_path, monkeypatch, one_thread):
    loss, calls = stored_regression.loss, []

    def main(out):
        return run("stored_regression", out / "store.png", "--steps", 2500)

    @functools.wraps(loss)  # the same loss, as far as the run can tell
    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2300:
            raise KeyboardInterrupt
        return loss(*arguments)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = main(whole)
    with monkeypatch.context() as patch:
        patch.setattr(stored_regression, "loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(parts)
    assert not (parts / "store.png").exists()
    printed += main(parts)  # from its checkpoint at 2,000
    store = sg.SampleStore(whole / "draws")
    assert [draw.step for draw in store] == list(range(510, 2501, 10))
    assert all(0 < draw.loss < 100 for draw in store)
    stored = contents(whole / "draws")
    # Draws in one file, the index, what ran, and the report's two forms.
    assert len(stored) == 5
    assert contents(parts / "draws") == stored
    assert printed.count("200 draws of chains [0], one in 10") == 2


def test_a_student_of_a_posterior(tmp_path, one_thread):
    options = ("--digits", "--epochs", 40, "--burn-in", 20, "--passes", 20)
    printed = run_example("distillation", "--out", tmp_path, *options)
    rows = re.findall(r"^(.*): error ([\d.]+)%, NLL ([\d.]+)", printed, re.MULTILINE)
    assert [name for name, *_ in rows] == ["40 draws", "student"]
    (_, error, nll), (_, student_error, student_nll) = rows
    assert float(student_error) < float(error) + 1.5
    assert float(student_nll) < 1.1 * float(nll)
