"""Every experiment of examples/papers at a small size, and one result of each paper.

Bounds lie at least four standard errors from what a right program gives.
"""

import numpy as np
import pytest
import torch
from ewsg2021.gaussian.chains import METHODS as EWSG_METHODS
from ewsg2021.gaussian.learning import learning_curves
from ewsg2021.gaussian.target import Gaussian
from harness.examples import run_example, run_experiment
from sbps2017.toys import figure1
from sghmc2014.bnn.data import load_digits
from sghmc2014.bnn.methods import build_model
from stored_files import contents

import torch_sgmcmc as sg

# A tiny run has fewer data in a subsample than the 100 blocks.
pytestmark = pytest.mark.filterwarnings("ignore:num_blocks")


@pytest.fixture(scope="module")
def covertype(tmp_path_factory):
    """1500 rows: 10 numbers, one of 4 areas, one of 40 soils, the class."""
    random = np.random.default_rng(0)
    rows = np.zeros((1500, 55), dtype=int)
    numbers = random.standard_normal((1500, 10))
    rows[:, :10] = np.round(100 + 30 * numbers)
    rows[np.arange(1500), 10 + random.integers(4, size=1500)] = 1
    rows[np.arange(1500), 14 + random.integers(40, size=1500)] = 1
    logit = numbers @ np.linspace(-1.5, 1.5, 10) + rows[:, 10] - rows[:, 12]
    is_second = random.random(1500) < 1 / (1 + np.exp(-logit))
    rows[:, 54] = np.where(is_second, 2, random.choice([1, 3, 7], 1500))
    root = tmp_path_factory.mktemp("data")
    (root / "covertype").mkdir()
    path = root / "covertype" / "covtype_subset.data.gz"
    np.savetxt(path, rows, fmt="%d", delimiter=",")
    return root


RATINGS = "--tiny --batch-size 100 --dimensions 3 --fold 0"
DIGITS = "--digits --seeds 1 --batch-size 50"
CHAINS = "--data-root COVERTYPE --chains 6"
PASSES = f"{DIGITS} --passes 2 --burn-in 1"
# Program, options, pictures that it draws, and a part of what it prints.
RUNS = [
    ("sghmc2014.bpmf", RATINGS, "bpmf", "| SGHMC |"),
    (
        "sghmc2014.mnist_heat",
        "--data-root DATA --seeds 1 --epochs 4 --start 1 --observe 2 --only page cool",
        "",
        "\n| page | 0 | ",
    ),
    ("sbps2017.figures", "--tiny", "figure1 figure2 figure3 figure4", "\nfigure5\n"),
    (
        "sbps2017.figure6",
        "--digits --draws 10 --batch-size 50 --epochs 30 --seeds 1 --lr 0.1",
        "figure6",
        "| SGLD, lr 0.1, widest |",
    ),
    ("ewsg2021.mnist", f"{PASSES} --chains 2", "learning", "| CP-SGHMC |"),
    ("ewsg2021.mnist", f"{PASSES} --method ewsg --model cnn", "", "| EWSG |"),
    ("ewsg2021.covertype", f"{CHAINS} --passes 1 --strata 4", "curves", "| FlyMC |"),
    (
        "ewsg2021.covertype",
        f"{CHAINS} --h 0.001 --passes 0.1 --method sghmc ewsg",
        "steps",
        "| SGHMC | 0.001 |",
    ),
    (
        "ewsg2021.covertype",
        f"{CHAINS} --tune --method ewsg --passes 0.1",
        "search",
        "| EWSG |",
    ),
    (
        "hmcecs2019.tables",
        "--tiny --data-root COVERTYPE --only splines figure9 --seeds 1 --method HMC "
        "perturbed",
        "figure6 figure9 splines_moments",
        "width of bands",
    ),
]
# Of which no result is written.
PRINTED = [
    ("sghmc2014.bpmf", f"{RATINGS} --tune --method sghmc", "| SGHMC |"),
    ("sghmc2014.bpmf", f"{RATINGS} --reference --sweeps 60", "40 sweeps: RMSE 0."),
    ("ewsg2021.mnist", f"{PASSES} --tune --method sgld", "The lowest NLL:\nsgld: "),
]


@pytest.mark.parametrize(("name", "options", "pictures", "words"), RUNS)
def test_a_run(name, options, pictures, words, covertype, tmp_path, request):
    words_of = {"COVERTYPE": covertype}
    if "DATA" in options.split():
        words_of["DATA"] = request.getfixturevalue("data_root")
    options = [words_of.get(word, word) for word in options.split()]
    printed, first = run_experiment(name, tmp_path, *options)
    assert words in printed
    assert {f.stem for f in tmp_path.glob("*.png")} >= {*pictures.split()}
    # Runs that are done are not made again.
    made = {f: f.stat().st_mtime_ns for f in (tmp_path / "runs").glob("*")}
    again = run_experiment(name, tmp_path, *options)[1]
    assert again.keys() == first.keys()
    assert made == {f: f.stat().st_mtime_ns for f in made}


@pytest.mark.parametrize(("name", "options", "words"), PRINTED)
def test_what_a_run_prints(name, options, words, tmp_path, request):
    options = options.split()
    if "DATA" in options:
        options[options.index("DATA")] = request.getfixturevalue("data_root")
    assert words in run_example(name, *options, "--out", tmp_path)


def test_figure_1_of_ewsg(tmp_path, monkeypatch):
    for name, few in {
        "STEPS": (0.02, 0.08),
        "LENGTHS": (0, 1, 4),
        "LENGTHS_ELSEWHERE": (4,),
        "DATA_SIZES": (20, 25),
        "LONGER": (0, 1, 4),
        "STEPS_BY_KIND": (0.02, 0.05),
    }.items():
        monkeypatch.setattr(f"ewsg2021.figure1.{name}", few)
    options = "--chains 100 --passes 3 --seeds 2 --other-data 2 --error-chains 400"
    options += " --smallest-step 9 --longest-time 3 --length-seeds 2"
    printed, _ = run_experiment("ewsg2021.figure1", tmp_path, *options.split())
    assert "Panels f to h" in printed and "Panels j, k, l" in printed
    assert {f.stem for f in tmp_path.glob("*.png")} == {"kl", "errors", "lengths"}


@pytest.mark.full
def test_ewsg_is_below_sghmc_at_equal_budget():
    methods = {name: EWSG_METHODS[name] for name in ("EWSG", "SGHMC")}
    sizes = {"chains": 4000, "passes": 30, "seeds": range(2)}
    results = learning_curves(Gaussian.draw(0), methods, **sizes)
    both = (results[name]["kl"] for name in methods)
    for ewsg, sghmc in zip(*both, strict=True):
        assert ewsg[-1] < 0.5 * sghmc[-1]


@pytest.mark.full
def test_noise_makes_bounces_frequent():
    """SBPS's figure 1."""
    waits = {}
    for case in figure1.CASES:
        result = figure1.simulate(case, 40.0, seed=1)
        waits[case] = np.diff(result["bounces"]).mean()
    assert waits["noisy gradient"] < 0.5 * waits["exact gradient"]


@pytest.mark.full
def test_naive_sghmc_is_wrong_without_a_test(tmp_path):
    """SGHMC's figure 1."""
    printed, found = run_experiment("sghmc2014.figures", tmp_path, "--tiny")
    for figure in ("figure1", "figure2", "figure3"):
        assert f"\n{figure}\n" in printed and (tmp_path / f"{figure}.png").exists()
    scores = {k: v[0] for k, v in found["figure1"]["scores"].items()}
    naive = scores.pop("naive SGHMC, no MH")
    for score in scores.values():
        clear = np.hypot(score["total_variation_error"], naive["total_variation_error"])
        assert naive["total_variation"] - score["total_variation"] > 4 * clear


@pytest.mark.parametrize("method", ["sghmc", "psbps"])
def test_the_digits_are_learnt_by_a_run_that_resumes(tmp_path, method):
    def run(out, epochs):
        options = (*DIGITS.split()[:-2], "--method", method, "--burn-in", 2)
        options += ("--epochs", epochs)
        name, folder = "sghmc2014.mnist", tmp_path / out
        return run_experiment(name, folder, *options)[1]["runs"][0]

    whole = run("whole", 6)
    run("parts", 3)
    resumed = run("parts", 6)
    for key in ("digest", "history", "samples"):
        assert whole[key] == resumed[key]
    assert whole["final"]["error"] < 0.5
    stores = [tmp_path / out / f"{method}-seed0" for out in ("whole", "parts")]
    assert contents(stores[0]) == contents(stores[1])
    if method == "psbps":  # of which few epochs have no sample time
        return
    # What is reported is what the stored draws predict.
    images, model = load_digits(), build_model(64, 1, torch.device("cpu"))
    mean = sg.predict(model, sg.SampleStore(stores[0]), images.test_x).mean
    right = mean.gather(1, images.test_y[:, None]).double()
    assert -right.log().mean().item() == pytest.approx(whole["final"]["nll"], abs=1e-6)
