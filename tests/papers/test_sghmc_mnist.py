"""The main job as a user runs it: its outputs. That it survives is in tests/faults."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.examples import PAPERS, run_example
from sghmc2014.bnn.pairs import difference
from stored_files import files

import torch_sgmcmc as sg

pytestmark = pytest.mark.examples


def common_options(out: Path) -> list[str]:
    return ["--threads", "1", "--seeds", "1", "--out", str(out)]


def command(out: Path, *options: str) -> list[str]:
    program = (str(PAPERS), "sghmc2014.mnist")
    return [sys.executable, *program, *common_options(out), *options]


def results(out: Path) -> list[dict]:
    return json.loads((out / "results.json").read_text())["runs"]


def test_all_methods_report_table_pictures_and_json(tmp_path: Path) -> None:
    output = subprocess.run(
        command(
            tmp_path, "--digits", "--epochs", "4", "--burn-in", "1", "--seeds", "2"
        ),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for label in ("SGD", "SGD with momentum", "SGLD", "SGHMC"):
        assert f"| {label} |" in output
    assert output.count(" points | ") == 6, "each two methods"
    for picture in ("figure4.png", "uncertainty.png", "learning.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    runs = results(tmp_path)
    assert len(runs) == 4 * 2
    assert len({run["digest"] for run in runs}) == len(runs)
    for run in runs:
        assert len(run["history"]) == 4
        is_sampler = run["config"]["method"] in ("sgld", "sghmc")
        assert run["samples"] == (3 if is_sampler else 0)


def test_images_are_compared_in_pairs() -> None:
    hard = np.arange(100) % 10 == 0  # for both methods
    assert difference(hard[None], hard[None]) == (0, 0, 0)
    mean, low, high = difference(hard[None] | (np.arange(100) < 50), hard[None])
    assert mean == pytest.approx(0.45)
    assert 0.3 < low < 0.4 and 0.5 < high < 0.6  # of binomial(100, 0.45)


def test_seeds_of_each_method_are_drawn_by_themselves() -> None:
    varies = np.array([[True] * 100, [False] * 100])
    assert difference(varies, ~varies) == (0, -1, 1)
    assert difference(varies, varies[1:]) == (0.5, 0, 1)
    assert difference(varies[1:], varies) == (-0.5, -1, 0)


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    options = ("--digits", "--method", "sgld", "--epochs", "3", "--burn-in", "1")
    example(tmp_path, *options[1:])
    again = subprocess.run(
        command(tmp_path, *options, "--lr", "0.01"), capture_output=True, text=True
    )
    assert again.returncode == 1
    assert "holds a run with other settings" in again.stderr


def test_mnist_figures(tmp_path: Path, data_root: Path) -> None:
    """Five epochs of real MNIST: far from converged, but learning and calibrated."""
    sizes = ("--method", "sghmc", "--epochs", "5", "--burn-in", "2")
    data = ("--data-root", str(data_root))
    run_example("sghmc2014.mnist", *common_options(tmp_path), *data, *sizes)
    (run,) = results(tmp_path)
    assert run["config"]["dataset"] == "MNIST"
    assert run["final"]["error"] < 0.09
    assert run["final"]["nll"] < 0.35
    assert all(p > 0 for p in run["final"]["precisions"])


def example(out: Path, *options: str) -> list[dict]:
    """What runs report whose program is called in this process."""
    run_example("sghmc2014.mnist", *common_options(out), "--digits", *options)
    return results(out)


def test_the_digits_are_learnt_by_all_methods(tmp_path: Path) -> None:
    """With the settings that are the defaults, a fifth as long.

    With MNIST's minibatches SGHMC is no better than chance: nine in ten are wrong.
    """
    methods = ("sgd", "sgdm", "sgld", "sghmc", "sbps", "psbps")
    sizes = ("--epochs", "40", "--burn-in", "15")
    for run in example(tmp_path, "--method", *methods, *sizes):
        assert run["config"]["batch_size"] == 100
        limit = 0.3 if run["config"]["method"] in ("sbps", "psbps") else 0.1
        assert run["final"]["error"] < limit, run["config"]["method"]


# ---- The bouncy particle: --method sbps and psbps ------------------------------------

IMAGES = 1200  # the digits' training images
MINIBATCH = 100


BOUNCY = ("--method", "sbps", "psbps", "--start-epochs", "1")


def test_a_bouncy_epoch_is_n_evaluations(tmp_path: Path) -> None:
    runs = example(tmp_path, *BOUNCY, "--epochs", "40", "--burn-in", "20")
    assert [r["config"]["method"] for r in runs] == ["sbps", "psbps"]
    for r in runs:
        for entry in r["history"]:
            budget = (entry["epoch"] - 1) * IMAGES
            assert budget <= entry["evaluations"] < budget + 2 * MINIBATCH
            assert entry["precisions"] == [1.0, 1.0]
        # Every sample time after burn-in has been a sample, and no other.
        interval = r["config"]["settings"]["sample_interval"]
        begin, end = (r["history"][i]["trajectory_time"] for i in (19, 39))
        assert r["samples"] == int(end / interval) - int(begin / interval)
        assert r["samples"] > 20
        assert r["final"]["bounces"] > 0


def test_the_particle_starts_where_sgd_with_momentum_ends(tmp_path: Path) -> None:
    common = ("--epochs", "3", "--burn-in", "2")
    (sgdm,) = example(tmp_path, "--method", "sgdm", *common)
    options = ("--method", "sbps", *common, "--start-epochs")
    (two,) = example(tmp_path / "two", *options, "2")
    (none,) = example(tmp_path / "none", *options, "0")
    assert [r["nll"] for r in two["history"]][:2] == (
        [r["nll"] for r in sgdm["history"]][:2]
    )
    assert two["final"]["nll"] != sgdm["final"]["nll"]
    assert none["history"][0]["nll"] != sgdm["history"][0]["nll"]


def test_the_precision_is_drawn_or_fixed(tmp_path: Path) -> None:
    common = ("--epochs", "2", "--burn-in", "1")
    (drawn,) = example(
        tmp_path / "a", *common, "--method", "sbps", *BOUNCY[3:], "--draw-precision"
    )
    assert all(p not in (0.0, 1.0) for p in drawn["final"]["precisions"])
    fixed = example(
        tmp_path / "b", *common, "--method", "sghmc", "sbps", "--precision", "2.5"
    )
    for r in fixed:
        assert r["config"]["settings"]["precision"] == 2.5
    assert fixed[1]["final"]["precisions"] == [2.5, 2.5]
    # What fixed[0] had is in the sampler that the checkpoint keeps.
    state = torch.load(tmp_path / "b" / "sghmc-seed0.pt", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    assert [group["prior_precision"] for group in groups] == [2.5, 2.5]


def test_a_resumed_bouncy_run_has_the_same_bits(tmp_path: Path) -> None:
    options = (*BOUNCY, "--burn-in", "2", "--draw-precision", "--epochs")
    whole = example(tmp_path / "whole", *options, "9")
    example(tmp_path / "parts", *options, "3")
    resumed = example(tmp_path / "parts", *options, "9")
    for one, other in zip(whole, resumed, strict=True):
        for key in ("digest", "history", "samples"):
            assert one[key] == other[key]


def test_draws_without_a_checkpoint_are_of_a_run_that_begins_anew(
    tmp_path: Path,
) -> None:
    """As a kill leaves them between the first draw and the first checkpoint."""
    options = ("--method", "sgld", "--epochs", "2", "--burn-in", "0")
    (whole,) = example(tmp_path, *options)
    before = files(tmp_path / "sgld-seed0")
    (tmp_path / "sgld-seed0.pt").unlink()
    (again,) = example(tmp_path, *options)
    assert again["digest"] == whole["digest"]
    assert files(tmp_path / "sgld-seed0") == before
    assert len(before) == 3  # two draws and the index


def test_a_resumed_run_goes_on_with_its_draws(tmp_path: Path) -> None:
    options = ("--method", "sghmc", "--burn-in", "1", "--epochs")
    (whole,) = example(tmp_path / "whole", *options, "5")
    example(tmp_path / "parts", *options, "3")
    (resumed,) = example(tmp_path / "parts", *options, "5")
    for key in ("digest", "history", "samples"):
        assert whole[key] == resumed[key]
    assert files(tmp_path / "parts" / "sghmc-seed0") == (
        files(tmp_path / "whole" / "sghmc-seed0")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lr", "0.1"), "--lr is not for sbps, psbps: they have no step size"),
        (("--start-epochs", "51"), "--start-epochs 51 must be in [0, --burn-in 50]"),
        (
            ("--precision", "1", "--draw-precision"),
            "--precision and --draw-precision exclude each other",
        ),
        (("--precision", "-1"), "--precision -1 must be finite and >= 0"),
    ],
)
def test_what_a_particle_cannot_have_is_refused(
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        example(tmp_path, *BOUNCY[:3], *options)
    assert message in capsys.readouterr().err


class FourEpochs:
    """A chain of SGLD whose epochs have 7, 2, no and 3 samples, the first 7 burn-in."""

    counts = (7, 2, 0, 3)

    def __init__(self, outputs: list[torch.Tensor], store: Path) -> None:
        from reproduce.checkpoint import Parts

        self.model = torch.nn.Linear(1, 2)
        self.sampler = sg.SGLD([self.model.bias], 0.1, num_data=1, seed=0)
        self.collectors = [sg.Collector(self.sampler, self.model, store, burn_in=7)]
        self.parts = Parts(model=self.model, sampler=self.sampler)
        self.outputs = outputs

    def train(self, epoch: int) -> None:
        for _ in range(self.counts[epoch - 1]):
            self.model.bias.grad = torch.ones(2)
            self.sampler.step()
            self.outputs.append(self.model.bias.detach().clone())

    def report(self) -> dict:
        return {}

    def parameters(self) -> list[torch.Tensor]:
        return []


def test_epochs_count_by_their_samples(tmp_path: Path) -> None:
    from sghmc2014.bnn.config import RunConfig
    from sghmc2014.bnn.loop import run_chain

    config = RunConfig("sbps", 0, (), 4, 1, 5, "none")
    labels = torch.zeros(5, dtype=torch.long)
    inputs = {"labelled": torch.zeros(5, 1)}
    outputs: list[torch.Tensor] = []
    for _ in range(2):  # the second time there is only the checkpoint
        begin = partial(FourEpochs, outputs)
        _, state = run_chain(config, begin, inputs, labels, tmp_path)
        assert len(outputs) == 12
        assert state["samples"] == 5
        expected = torch.stack(outputs[-5:]).softmax(1).mean(0).expand(5, 2)
        assert torch.allclose(state["predictions"]["labelled"], expected, atol=1e-6)


def test_the_table_is_that_of_the_stored_draws(tmp_path: Path) -> None:
    from sghmc2014.bnn.data import load_digits
    from sghmc2014.bnn.methods import build_model

    methods = ("sghmc", "psbps")
    options = (*BOUNCY[3:], "--epochs", "6", "--burn-in", "3")
    runs = example(tmp_path, "--method", *methods, *options)
    images = load_digits()
    model = build_model(64, 1, torch.device("cpu"))
    for r in runs:
        draws = sg.SampleStore(tmp_path / f"{r['config']['method']}-seed0")
        mean = sg.predict(model, draws, images.test_x).mean
        right = mean.gather(1, images.test_y[:, None]).double()
        assert len(draws) == r["samples"] >= 3
        assert -right.log().mean().item() == pytest.approx(r["final"]["nll"], abs=1e-6)


def test_draws_are_the_networks_at_the_sample_times_after_burn_in(
    tmp_path: Path,
) -> None:
    from sghmc2014.bnn.bouncy import BouncyChain
    from sghmc2014.bnn.config import RunConfig
    from sghmc2014.bnn.data import load_digits
    from sghmc2014.bnn.methods import METHODS

    images = load_digits()
    settings = METHODS["sbps"] | {"start_epochs": 0, "sample_interval": 0.01}
    config = RunConfig("sbps", 0, tuple(settings.items()), 2, 1, 500, images.name)
    chain = BouncyChain(config, images, tmp_path / "store")
    kept: list[list[torch.Tensor]] = []
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
    names = list(chain.model.state_dict())
    for draw, expected in zip(draws, kept[of_burn_in:], strict=True):
        assert all(
            torch.equal(draw[n], t) for n, t in zip(names, expected, strict=True)
        )
