"""The figures of the SBPS paper, at a tiny size and against what is known."""

import itertools

import numpy as np
import pytest
import torch
from harness.examples import run_experiment
from harness.statistics import check_mean, check_z
from sbps2017.figures import FIGURES
from sbps2017.toys import comparison, figure1, figure2, figure3, figure5, paths
from sbps2017.toys.figure4 import METHODS
from sbps2017.toys.logistic import simulate
from sbps2017.toys.methods import chains
from torch.nn import functional as F

import torch_sgmcmc as sg


@pytest.fixture(scope="module")
def problem():
    return simulate(20, seed=0)


def test_tables_and_pictures_are_made_once(tmp_path):
    printed, first = run_experiment("sbps2017.figures", tmp_path, "--tiny")
    for name in FIGURES:
        assert f"\n{name}\n\n| " in printed and (tmp_path / f"{name}.png").exists()
    # One seed, one result; and finished runs are not made again.
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*")}
    for file in list(made)[::4]:
        file.unlink()
    some = ("figure2", "figure4")
    again = run_experiment("sbps2017.figures", tmp_path, "--tiny", "--only", *some)[1]
    for document in (first, again):
        del document["figure4"]["cpu_seconds"]
    assert [again[name] for name in some] == [first[name] for name in some]
    for file in made.keys() - {*list(made)[::4]}:
        assert file.stat().st_mtime_ns == made[file]


def test_the_corners_equal_those_of_the_trajectory(problem):
    """It has unit speed, and passes where the sampler's own samples are."""
    start = problem.laplace_draws(1, seed=0)[0]
    path = paths.bounce(problem, start, 300, seed=4)
    lengths = np.linalg.norm(np.diff(path.corners, axis=0), axis=1)
    np.testing.assert_allclose(lengths, np.diff(path.times), atol=1e-9)
    w = torch.nn.Parameter(torch.from_numpy(start.copy()))
    interval = path.times[-1] / 40
    sampler = sg.SBPS([w], num_data=1000, num_std=3.0, seed=4, sample_interval=interval)
    samples = []
    sampler.register_sample_hook(
        lambda sampler, time: samples.append(w.detach().numpy().copy())
    )
    batches = paths.minibatches(problem, 1, seed=4)

    def closure():
        x, y = next(batches)
        return F.binary_cross_entropy_with_logits(x[0] @ w, y[0], reduction="none")

    for _ in range(300):
        sampler.step(closure)
    np.testing.assert_allclose(path.samples(40)[:39], samples[:39], atol=1e-9)


def test_autocorrelations_of_a_known_chain():
    random = np.random.default_rng(0)
    values = np.zeros(200_000)
    noise = random.standard_normal(len(values))
    for i in range(1, len(values)):
        values[i] = 0.8 * values[i - 1] + noise[i]
    found = paths.autocorrelation(values + 3, 6, 3.0)
    np.testing.assert_allclose(found, 0.8 ** np.arange(6), atol=0.02)
    expected = len(values) * (1 - 0.8) / (1 + 0.8)
    assert paths.effective_size(values) == pytest.approx(expected, rel=0.1)


def test_measures_of_independent_draws():
    """All are 1, and the effective size their number; others where draws are wrong."""
    random = np.random.default_rng(1)
    deviations = np.array([2.0, 0.1])
    moments = np.array([1.0, 0.0]), deviations**2
    reference = comparison.Reference(np.empty((1, 20)), *moments, 0.0)
    extremes = reference.mean + deviations * random.standard_normal((2, 4000, 2))
    runs = {"epochs": np.arange(1, 4001) / 10, "excess": np.linspace(99, 0, 4000)}
    first = {key: np.tile(value, (2, 1)) for key, value in runs.items()}

    def measured(extremes):
        later = {"excess": np.full((2, 9), 7.0), "extremes": extremes}
        return comparison.measure(first, later, reference, 400)

    right = measured(extremes)
    np.testing.assert_allclose(right["variance_ratio"], 1, atol=0.1)
    np.testing.assert_allclose(right["jump"], 1, atol=0.1)
    np.testing.assert_allclose(right["effective_size"], 1000, rtol=0.15)
    assert right["excess"] == [7.0, 7.0]
    # U falls below 10 + 2 √10 at this share of 400 epochs.
    near = 400 * (1 - (10 + 2 * 10**0.5) / 99)
    assert right["epochs_to_posterior"] == pytest.approx([near, near], abs=0.2)
    slow = measured(np.repeat(extremes[:, ::400], 400, axis=1))
    assert np.all(np.array(slow["jump"]) < 0.7)
    shifted = measured(extremes + deviations)
    np.testing.assert_allclose(shifted["variance_ratio"], 2, atol=0.2)


def test_the_finding_of_figure_4(problem):
    """SBPS comes near faster than the exact samplers and than SGLD with small steps."""
    start = problem.laplace_draws(3, seed=1, scale=10.0)
    low = problem.energy(problem.mode)
    excess = {}
    for name in ("SBPS", "SGLD 0.1", "SGLD 0.01", "lipSBPS", "ZZ-SS"):
        _, samples, _ = chains(problem, METHODS[name], start, 30, 0, name)
        excess[name] = (problem.energy(samples[:, -50:]) - low).mean()
    begin = (problem.energy(start) - low).mean()
    assert excess["SBPS"] < 0.4 * begin
    assert excess["SGLD 0.1"] < 0.5 * begin
    for slow in ("SGLD 0.01", "lipSBPS", "ZZ-SS"):
        assert 0.6 * begin < excess[slow] < begin


def test_the_noise_of_figure_1():
    """Fresh each time, and N(0, 5²) in each component about the gradient of U."""
    w = torch.nn.Parameter(torch.tensor([0.7, -0.4], dtype=torch.float64))
    (exact,) = torch.autograd.grad(figure1.energy(w), w)
    closure = figure1.closure_of(w, True, seed=0)
    grads = [torch.autograd.grad(closure().mean(), w)[0] for _ in range(2000)]
    noise = (torch.stack(grads) - exact).numpy()
    check_mean(noise, 0.0, label="noise")
    check_mean(noise**2, 25.0, label="variance")
    check_mean(noise[1:] * noise[:-1], 0.0, label="one after the other")
    # What SBPS sees of it: the spread of the examples along a direction.
    losses = closure()
    assert losses.shape == (figure1.EXAMPLES,)
    grads = (torch.autograd.grad(loss, w, retain_graph=True)[0] for loss in losses)
    along = torch.stack([grad[0] for grad in grads])
    assert 0.7 * 25 < along.var() / len(losses) < 1.4 * 25
    plain = figure1.closure_of(w, False, seed=0)()
    torch.testing.assert_close(plain.detach(), figure1.energy(w).detach().expand(2))


@pytest.mark.full
def test_the_finding_of_figure_1():
    """Bounces are far more frequent with noise; times and samples are as asked for."""
    waits = {}
    for case in figure1.CASES:
        result = figure1.simulate(case, 40.0, seed=1)
        waits[case] = np.diff(result["bounces"]).mean()
        # The last event may be a little later than asked for.
        assert 0 <= len(result["samples"]) - 40.0 / figure1.INTERVAL < 10
        # The average of the trajectory and that of its samples.
        mean, square = result["moments"][:2]
        assert abs(mean - result["samples"][:, 0].mean()) < 0.1
        assert abs(square - (result["samples"][:, 0] ** 2).mean()) < 0.2
    assert waits["noisy gradient"] < 0.5 * waits["exact gradient"]


def test_the_clock_is_read_right():
    """Against the full gradient, the geometry of lines, and the law of thinning."""
    problem = simulate(2, figure2.DATA_SEED)
    lines = figure2.follow(problem, problem.laplace_draws(1, seed=3)[0], 1500, seed=0)
    scores, surprises = [], []
    for line, following in itertools.pairwise(lines):
        times = np.array([look.time for look in line.looks])
        assert np.all(np.diff(times) > 0) and line.looks[0].times[0] == 0.0
        end = line.origin + times[-1] * line.velocity
        np.testing.assert_allclose(following.origin, end, atol=1e-12)
        assert [look.bounced for look in line.looks[:-1]] == [False] * len(times[:-1])
        assert line.looks[-1].bounced and line.looks[-1].value > 0
        for look, true in zip(line.looks, line.true_rate(problem, times), strict=True):
            scores.append((look.value - true) / look.error)
            if not np.isnan(look.rate):
                assert look.rates[-1] == look.rate > 0
                chance = min(1.0, max(0.0, look.value) / look.rate)
                surprises.append(look.bounced - chance)
    scores, surprises = np.array(scores), np.array(surprises)
    assert len(lines) > 100
    # Where it bounces G was observed by chance too high, so the mean is taken over
    # all looks; the error is estimated too, from 100 examples.
    check_z({"mean": scores.sum() / len(scores) ** 0.5}, label="observations")
    assert 0.8 < scores.std() < 1.25
    check_mean(surprises[:, None], 0.0, label="thinning")


def test_the_targets_of_figure_3():
    """The authors' program has a target wide along the first axis, the paper not."""
    words, program = (
        [figure3.directions(simulate(20, i, wide=wide)) for i in range(3)]
        for wide in figure3.TARGETS.values()
    )
    # The authors' data had 958.
    assert all(800 < d["condition_number"] < 1300 for d in program)
    assert all(d["largest_weight"] > 0.95 for d in program)
    assert all(d["largest_weight"] < 0.5 for d in words)


def test_the_finding_of_figure_3():
    """Whatever learns moves far along the axis that is wide, SBPS does not."""
    problem = simulate(20, seed=0, wide=1 / 500)
    start = problem.posterior_draws(1, seed=0)[0]
    moved = {}
    for name, method in figure3.METHODS.items():
        path = paths.bounce(problem, start, 1000, seed=0, **method.options)
        along = problem.along_extremes(path.samples(1000))[:, 0]
        moved[name] = np.square(along[200:] - along[:-200]).mean()
    for name in figure3.METHODS.keys() - {"SBPS"}:
        assert moved[name] > 10 * moved["SBPS"], name


def test_averages_equal_those_of_the_library():
    """The continuous one is TimeAverage's; the other takes points at regular times."""
    problem = simulate(3, seed=1)
    start = problem.laplace_draws(1, seed=0)[0]
    r = 0.05
    w = torch.nn.Parameter(torch.from_numpy(start.copy()))
    sampler = sg.SBPS([w], num_data=1000, num_std=3.0, seed=0)
    average = sg.TimeAverage(
        sampler, lambda: torch.sin((w[0] - problem.mode[0]) / r), max_piece=0.1 * r
    )
    batches = paths.minibatches(problem, 1, seed=0)

    def closure():
        x, y = next(batches)
        return F.binary_cross_entropy_with_logits(x[0] @ w, y[0], reduction="none")

    times, corners = [0.0], [start[0]]
    for _ in range(150):
        sampler.step(closure)
        if sampler.trajectory_time > times[-1]:
            times.append(sampler.trajectory_time)
            corners.append(float(w[0].detach()))
    values = np.array(corners) - problem.mode[0]
    continuous, discrete = figure5.averages(np.array(times), values, r)
    assert continuous[-1] == pytest.approx(float(average.value), abs=1e-8)
    count = len(times) - 1
    regular = times[-1] * np.arange(1, count + 1) / count
    points = np.sin(np.interp(regular, times, values) / r)
    assert discrete[-1] == pytest.approx(points.mean(), abs=1e-12)
    assert discrete[0] == pytest.approx(points[0], abs=1e-12)


def test_the_finding_of_figure_5(problem):
    """Points are as good as independent ones there, the trajectory far better."""
    start = problem.posterior_draws(1, seed=0)[0]
    path = paths.bounce(problem, start, 1000, seed=1)
    moved = np.r_[True, np.diff(path.times) > 0]
    r = 0.01 * path.times[-1] / 1000
    errors = [
        [a[-1] for a in figure5.averages(path.times[moved], x, r)]
        for x in (path.corners[moved] - problem.mode).T
    ]
    continuous, discrete = np.sqrt(np.mean(np.square(errors), axis=0))
    assert 0.5 < discrete * (2 * 1000) ** 0.5 < 1.6
    assert continuous < 0.5 * discrete
