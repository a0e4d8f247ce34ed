"""EWSG's figure 3 as a user runs it: equal budgets, learning, resuming, diagnostics."""

import re

import pytest
import torch
from ewsg2021.ensemble.chain import NetworkChain
from ewsg2021.ensemble.diagnostics import log_weight_difference, noise_ratio
from ewsg2021.ensemble.methods import PAPER, build_sampler
from ewsg2021.ensemble.models import build_model
from ewsg2021.ensemble.report import differences
from harness.examples import run_example, run_experiment
from sghmc2014.bnn.data import load_digits

import torch_sgmcmc as sg
from torch_sgmcmc.core.ops import ewsg_log_ratio

METHODS = ["ewsg", "sghmc", "cp_sghmc", "sgld", "psgld"]
IMAGES = 1400  # training images of the digits, with the validation images

# The step sizes are for MNIST's 60,000 images; the digits need larger ones.
UNDERDAMPED = ("--h", "7e-3", "--gamma", "15")
STEP_SIZES = {
    **{"ewsg": UNDERDAMPED, "sghmc": UNDERDAMPED, "cp_sghmc": UNDERDAMPED},
    **{"sgld": ("--h", "3e-4"), "psgld": ("--h", "1e-3")},
}


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


@pytest.mark.parametrize(
    ("options", "size", "updates"), [((), 50, 14), (("--halved",), 25, 28)]
)
def test_ewsg_has_fewer_updates_or_smaller_minibatches(
    tmp_path, options, size, updates
):
    """Epochs for the same number of gradients."""
    arguments = ("--method", "ewsg", "--passes", 1, "--burn-in", 0, *options)
    _, document = run(tmp_path, *arguments)
    (r,) = document["runs"]
    assert r["final"]["gradients"] == IMAGES
    state = torch.load(tmp_path / "mlp-ewsg-seed0.pt")
    (chain,) = state["chains"].values()
    steps = chain["sampler"]["param_groups"][0]["step"]
    assert (steps, IMAGES // (2 * steps)) == (updates, size)


def test_runs_are_independent_and_documented(everything):
    document = everything[2]
    runs = document["runs"]
    # SGHMC and CP-SGHMC have the same settings: what differs is the minibatches.
    assert len({r["digest"] for r in runs}) == len(runs)
    assert document["environment"]["threads"] == 1
    for r in runs:
        is_ewsg = r["config"]["method"] == "ewsg"
        assert r["diagnostics"]["noise_ratio"] > 0
        assert ("log_weight_difference" in r["diagnostics"]) == is_ewsg
        assert ("acceptance_rate" in r["final"]) == is_ewsg
        if is_ewsg:
            assert 0 < r["final"]["acceptance_rate"] < 1


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


@pytest.mark.parametrize("method", ["ewsg", "sgld", "psgld"])
def test_methods_learn(tmp_path, method):
    options = ("--method", method, "--passes", 12, "--burn-in", 8)
    (r,) = run(tmp_path, *options, *STEP_SIZES[method])[1]["runs"]
    assert r["final"]["error"] < 0.15
    assert r["final"]["nll"] < 0.6


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


def test_psgld_stops_adapting_with_burn_in(tmp_path):
    options = ("--method", "psgld", "--burn-in", "0.5", "--samples-per-pass", "2")
    squares, weights = [], []
    for passes in (1, 2):  # the second continues the first
        run(tmp_path, *options, "--passes", passes)
        state = torch.load(tmp_path / "mlp-psgld-seed0.pt", weights_only=True)
        (chain,) = state["chains"].values()
        squares.append(chain["sampler"]["state"][0]["square_average"])
        weights.append(chain["model"]["0.weight"])
    assert torch.equal(squares[0], squares[1])
    assert squares[0].count_nonzero() > 0
    assert not torch.equal(weights[0], weights[1])


def rows_of_tune(printed):
    """Returns each row's settings, and its seeds' NLLs where there are several."""
    rows = []
    for line in printed.splitlines():
        if line.startswith("| sgld |"):
            _, _, words, seeds, _, nll, _ = line.split("|")
            values = [float(v) for v in re.findall(r"[0-9.]+", nll)]
            rows.append((words.strip(), int(seeds), values))
    return rows


def test_tune_chooses_among_finalists_with_all_seeds(tmp_path):
    options = ("--digits", "--seeds", 2, "--batch-size", 50, "--out", tmp_path)
    options += ("--tune", "--method", "sgld", "--passes", 1, "--burn-in", 0)
    printed = run_example("ewsg2021.mnist", *options)
    rows = rows_of_tune(printed)
    first, finalists = rows[:13], rows[13:]
    assert first[0][0] == "h 1e-07"
    assert len({words for words, _, _ in first}) == 13
    assert {seeds for _, seeds, _ in first} == {1}
    best = sorted(first, key=lambda row: row[2][0])[:3]
    assert [words for words, _, _ in finalists] == [words for words, _, _ in best]
    for (_, seeds, (mean, *both)), (_, _, (alone,)) in zip(
        finalists, best, strict=True
    ):
        assert seeds == 2 and both[0] == alone != both[1]
        assert mean == pytest.approx(sum(both) / 2, abs=2e-4)
    chosen, _, _ = min(finalists, key=lambda row: row[2][0])
    assert printed.endswith(f"The lowest NLL:\nsgld: {chosen}\n")


def test_the_papers_networks():
    convolutions = 32 * (25 + 1) + 64 * (32 * 25 + 1)
    dense = 200 * (4 * 4 * 64 + 1) + 200 * (200 + 1) + 10 * (200 + 1)
    for name, inputs, parameters in (
        ("mlp", 784, 100 * 785 + 10 * 101),
        ("cnn", 784, convolutions + dense),
        ("cnn", 64, convolutions + 200 * (2 * 2 * 64 + 1) + dense - 200 * 1025),
    ):
        model = build_model(name, inputs, seed=0)
        assert sum(p.numel() for p in model.parameters()) == parameters
        assert model(torch.zeros(3, inputs)).shape == (3, 10)


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


def test_noise_ratio():
    p = torch.nn.Parameter(torch.zeros(2))
    gradients = torch.tensor([[1.0, 5.0], [3.0, 5.0]])  # variances 2 and 0
    sghmc = sg.SGHMC([p], 0.1, 0.75, num_data=10)
    # 0.1² (2 + 0) against 2 * 0.25 * 0.1 (1 + 1) / 10
    assert noise_ratio(sghmc, gradients) == pytest.approx(2.0)
    sgld = sg.SGLD([p], 0.1, num_data=10)
    assert noise_ratio(sgld, gradients) == pytest.approx(0.5)
    psgld = sg.PSGLD([p], 0.1, num_data=10, gamma=False, eps=0.5)
    p.grad = torch.tensor([1.5, 3.5])
    psgld.step()  # V = grad², G = 1/2 and 1/4
    # 0.1² (2/4 + 0) against 2 * 0.1 (1/2 + 1/4) / 10
    assert noise_ratio(psgld, gradients) == pytest.approx(1 / 3)


def test_log_weight_difference_equals_the_index_chain():
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(7, generator=generator))
    settings = {"lr": 0.3, "momentum": 0.8, "num_data": 11.0, "prior_precision": 2.0}
    sampler = sg.EWSG([p], **settings, seed=0)

    def closure():
        loss = (p**2).sum()
        loss.backward()
        return loss

    sampler.step(closure)
    gradients = torch.randn(2, 7, generator=generator)
    momenta = [sampler.state[p]["momentum"]]
    lists = [p.detach()], [gradients[0]], [gradients[1]], momenta
    options = {"temperature": 1.0, "surrogate": 0, "num_chains": 1}
    ratio = ewsg_log_ratio(*lists, **settings, **options)
    assert log_weight_difference(sampler, gradients) == pytest.approx(
        abs(float(ratio)), rel=1e-5
    )


def test_differences():
    def states(*errors):
        return [{"history": [{"error": e, "nll": e}]} for e in errors]

    runs = {"ewsg": states(0.05, 0.07), "sgld": states(0.02, 0.04)}
    # A standard error of √2 points, and t with two degrees of freedom: 4.3027
    row = "| SGLD | +3.00 [-3.08, +9.08] | -0.0300 [-0.0908, +0.0308] |"
    assert differences(runs).splitlines()[-1] == row
    assert differences({"ewsg": states(0.05), "sgld": states(0.02)}) == ""
