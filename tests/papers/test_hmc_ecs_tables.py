"""The tables and figures of the HMC-ECS paper: a tiny run, and what it is made of."""

import gzip
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.examples import run_experiment
from hmcecs2019 import comparison, measures, realised, samplers, splines, variances
from hmcecs2019.comparison import choose
from hmcecs2019.higgs import higgs
from hmcecs2019.problem import Covariate, Problem
from hmcecs2019.samplers import Run, Size
from hmcecs2019.simulated import BLOCK, DIMENSION, rows, simulate
from hmcecs2019.tables import covertype

# A tiny run has fewer data in a subsample than the 100 blocks.
pytestmark = pytest.mark.filterwarnings("ignore:num_blocks")

METHODS = ["HMC", "perturbed", "signed", "SGHMC, CV", "SGLD"]


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """Five of the 29 columns, 3000 rows."""
    whole = simulate(3000, 300, tmp_path_factory.mktemp("data"))
    columns = slice(0, 5)
    return replace(whole, x=whole.x[:, columns], test_x=whole.test_x[:, columns])


@pytest.fixture(scope="module")
def laplace(problem):
    return problem.laplace(torch.zeros(5, dtype=torch.float64))


@pytest.mark.full
def test_numbers_and_pictures(tmp_path):
    options = ("--tiny", "--only", "simulated", "figure7", "figure8", "--method")
    printed, found = run_experiment("hmcecs2019.tables", tmp_path, *options, *METHODS)
    for name in (*METHODS, "95 % interval", "after the last"):
        assert name in printed
    pictures = {f"simulated_{name}" for name in ("moments", "densities", "costs")}
    assert {f.stem for f in tmp_path.glob("*.png")} == pictures | {"figure7", "figure8"}
    numbers = found["simulated"]["methods"]
    assert list(numbers) == METHODS
    assert [len(numbers[name]) for name in METHODS] == [1, 2, 2, 2, 2]
    full, ecs, signed = (numbers[name][0] for name in METHODS[:3])
    # 20 burn-in and 5 draws of 8 chains, each 7 gradients, and Newton's passes.
    passes = full["evaluations"] / 3000
    assert 8 * 25 * 7 < passes < 8 * 25 * 7 + 40
    # A trajectory's 6 gradients and u's one, each of 100 data; θ*; u.
    assert ecs["evaluations"] >= 3000 + 24 * 7 * 100
    # The pilot's too: another pass, and its 100 draws.
    assert signed["evaluations"] >= 2 * 3000 + 100 * 7 * 100
    assert ecs["num_steps"] == 6 and ecs["step_size"] == 0.2
    assert numbers["SGLD"][0]["evaluations"] == 24 * 6 * 100


def test_splines_and_the_order_of_expansions(tmp_path):
    write_covertype(tmp_path, covertype_table(5000))
    options = ("--tiny", "--data-root", tmp_path, "--only", "splines", "figure9")
    options += ("--seeds", 1, "--method", "HMC", "perturbed")
    printed, found = run_experiment("hmcecs2019.tables", tmp_path / "out", *options)
    assert "n = 4,000, d = 81" in printed and "width of bands" in printed
    assert len(found["splines"]["realised"]["perturbed"]["difference"]) == 1
    names = ["HMC", "perturbed", "perturbed, order 1", "perturbed, order 0"]
    assert list(found["figure9"]["methods"]) == names
    pictures = {f.stem for f in (tmp_path / "out").glob("*.png")}
    assert pictures >= {"figure6", "figure9", "splines_moments"}


def test_simulated_rows_do_not_depend_on_chunks(tmp_path):
    x, y = rows(0, BLOCK + 500, seed=0)
    parts = [(0, 7), (7, BLOCK - 1), (BLOCK - 1, BLOCK + 1), (BLOCK + 1, BLOCK + 500)]
    pieces = [rows(begin, end, seed=0) for begin, end in parts]
    np.testing.assert_array_equal(np.concatenate([p[0] for p in pieces]), x)
    np.testing.assert_array_equal(np.concatenate([p[1] for p in pieces]), y)
    problem = simulate(BLOCK + 100, 50, tmp_path)
    np.testing.assert_array_equal(problem.x, x[: BLOCK + 100])
    np.testing.assert_array_equal(problem.test_x, x[BLOCK + 100 : BLOCK + 150])
    np.testing.assert_array_equal(problem.y, y[: BLOCK + 100])
    assert not np.array_equal(rows(0, 9, seed=1)[0], x[:9])
    assert not np.array_equal(x[:400], x[BLOCK : BLOCK + 400])


def covertype_table(count):
    table = np.zeros((count, 55), dtype=int)
    table[:, :10] = np.random.default_rng(0).integers(0, 99, (count, 10))
    table[::2, 10], table[1::2, 11] = 1, 1
    table[::4, 20], table[0, 30] = 1, 1
    table[:, 54] = 1 + np.arange(count) % 3
    return table


def write_covertype(root, table):
    (root / "covertype").mkdir()
    path = root / "covertype" / "covtype_subset.data.gz"
    np.savetxt(path, table, fmt="%d", delimiter=",")


def test_covertype_without_rare_indicators(tmp_path):
    table = covertype_table(1000)
    write_covertype(tmp_path, table)
    problem = covertype(tmp_path, 0.01)
    assert problem.x.shape == (800, 13) and problem.test_x.shape == (200, 13)
    np.testing.assert_allclose(problem.x[:, 12].mean(), 0.25, atol=0.03)
    assert torch.all(problem.x[:, 10:12].sum(1) == 1)
    second = torch.cat([problem.y, problem.test_y]).sum()
    assert second == np.sum(table[:, 54] == 2)
    assert covertype(tmp_path, 0.0).dimension == 54


def test_splines_equal_those_of_the_knots():
    values = np.random.default_rng(0).gamma(2.0, size=2000)
    places = splines.knots(values)
    assert len(places) == splines.FUNCTIONS + 1
    np.testing.assert_allclose(np.mean(values < places[0]), 0.02, atol=1e-3)
    at_knots = splines.basis(places, places)
    np.testing.assert_allclose(at_knots, np.delete(np.eye(11), 5, axis=1), atol=1e-12)
    # With the intercept they make every line, on both sides of the knots too.
    inside = np.linspace(places[0], places[-1], 301)
    x = np.concatenate([[-3.0], inside, [20.0]])
    columns = splines.basis(x, places)
    line = columns @ np.delete(places - places[5], 5) + places[5]
    np.testing.assert_allclose(line, x, atol=1e-9)
    # And a curve, to what its second derivative at the ends leaves.
    heights = np.cos(places / 3)
    curve = columns[1:-1] @ np.delete(heights - heights[5], 5) + heights[5]
    np.testing.assert_allclose(curve, np.cos(inside / 3), atol=0.03)
    # Beyond the knots all are lines: the cubic's continuation would be in thousands.
    far = splines.basis(places[-1] + np.array([1e-9, 5.0, 10.0, 15.0]), places)
    assert np.abs(np.diff(far, n=2, axis=0)[1]).max() < 1e-6
    np.testing.assert_allclose(far[0], at_knots[-1], atol=1e-6)


def test_the_spline_problem(tmp_path):
    table = covertype_table(2000)
    write_covertype(tmp_path, table)
    problem = splines.spline_problem(tmp_path)
    assert problem.x.shape == (1600, 81) and problem.test_x.shape == (400, 81)
    assert torch.all(problem.x[:, 0] == 1) and torch.all(problem.test_x[:, 0] == 1)
    # The test rows' functions are of the training rows' knots.
    plain = covertype(tmp_path, 0.0)
    places = splines.knots(plain.x[:, 9].double().numpy())
    expected = splines.basis(plain.test_x[:, 9].double().numpy(), places)
    np.testing.assert_allclose(problem.test_x[:, 71:], expected, atol=1e-5)
    assert torch.equal(problem.y, plain.y)
    assert problem.covariate is not None
    assert torch.equal(problem.covariate.values, plain.x[:, 0])
    with pytest.raises(ValueError, match=r"has the knots .* \(must increase"):
        splines.knots(np.repeat([0.0, 1.0, 2.0], 100))


def higgs_lines(count):
    random = np.random.default_rng(0)
    features = random.normal(3.0, 2.0, (count, DIMENSION - 1))
    labels = random.integers(2, size=count)
    return [
        ",".join([f"{label:.18e}", *(f"{value:.18e}" for value in row)])
        for label, row in zip(labels, features, strict=True)
    ]


def test_higgs_is_read(tmp_path):
    lines = higgs_lines(60)
    text = "\n".join(lines) + "\n"
    (tmp_path / "plain.csv").write_text(text)
    with gzip.open(tmp_path / "packed.csv.gz", "wt") as file:
        file.write(text)
    plain = higgs(tmp_path / "plain.csv", tmp_path / "data")
    packed = higgs(tmp_path / "packed.csv.gz", tmp_path / "data")
    assert torch.equal(plain.x, packed.x) and torch.equal(plain.y, packed.y)
    assert plain.x.shape == (54, DIMENSION) and plain.test_x.shape == (6, DIMENSION)
    table = np.array([[float(v) for v in line.split(",")] for line in lines])
    np.testing.assert_array_equal(plain.y, table[:54, 0])
    np.testing.assert_array_equal(plain.test_y, table[54:, 0])
    assert torch.all(plain.x[:, 0] == 1)
    train = table[:54, 1:]
    expected = (table[:, 1:] - train.mean(0)) / train.std(0)
    both = torch.cat([plain.x, plain.test_x])[:, 1:]
    np.testing.assert_allclose(both, expected, atol=1e-5)
    few = higgs(tmp_path / "plain.csv", tmp_path / "few", test_rows=2)
    assert few.test_x.shape == (2, DIMENSION)


def test_bad_files_of_higgs(tmp_path):
    good = higgs_lines(3)
    path = tmp_path / "bad.csv"
    for lines, message in (
        ([*good, "1,2,3"], "columns changed"),
        (["1,2,3"] * 3, r"3 columns after line 0 \(must be 29"),
        ([good[0], good[1].replace("e", "x")], "not numbers and commas after line 0"),
        ([good[0], "2" + good[1][1:]], "row 2 has the label 2"),
        ([good[0].rsplit(",", 1)[0] + ",nan", good[1]], "or a feature that is not fin"),
        (good[:1], r"1 rows \(must be at least 2\)"),
        ([], r"0 rows \(must be at least 2\)"),
    ):
        path.write_text("".join(f"{line}\n" for line in lines))
        with pytest.raises(ValueError, match=message):
            higgs(path, tmp_path / "data")
    # Nothing half-done is taken for the whole next time.
    assert not list((tmp_path / "data").glob("higgs*"))


def test_potential_and_laplace_approximation(problem, laplace):
    x, y = problem.x.double(), problem.y.double()

    def energy(theta):
        logits = x @ theta
        of = torch.nn.functional.binary_cross_entropy_with_logits
        losses = of(logits, y, reduction="sum")
        return losses + 0.5 * problem.prior_precision * theta @ theta

    thetas = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    values = torch.stack([energy(theta) for theta in thetas])
    (expected,) = torch.autograd.grad(values.sum(), thetas)
    value, gradient = problem.potential(thetas.detach())
    torch.testing.assert_close(value, values.detach())
    torch.testing.assert_close(gradient, expected)
    indices = torch.arange(len(x))
    with torch.no_grad():
        likelihoods = problem.log_likelihoods(thetas[0])(indices)
    prior = 0.5 * problem.prior_precision * thetas[0].detach().square().sum()
    torch.testing.assert_close(prior - likelihoods.sum(), value[0])
    hessian = torch.autograd.functional.hessian(energy, laplace.mode)
    torch.testing.assert_close(laplace.hessian, hessian, rtol=1e-4, atol=1e-2)
    shift = torch.linalg.solve(hessian, problem.potential(laplace.mode[None])[1][0])
    assert float((shift / laplace.deviations).abs().max()) < 1e-3
    root = laplace.root
    eye = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(root.T @ laplace.hessian @ root, eye)
    variances = torch.linalg.inv(laplace.hessian).diag()
    torch.testing.assert_close(laplace.deviations**2, variances)


def test_all_methods_sample_the_posterior(problem, laplace, tmp_path):
    """Deviations to 15 %; a step on another scale would change them by 30 % or more."""
    truth = measures.Truth.laplace(laplace)
    size = Size(1, 300, 300, 60, 500)
    start = laplace.mode
    common = (problem, laplace)
    plain, rest = samplers.gradient_method, (300, 500, 0, tmp_path)
    runs = {
        "HMC": samplers.hmc(*common, 320, 0, tmp_path),
        "perturbed": samplers.hmc_ecs(problem, start, size, 0, tmp_path),
        "SGHMC": plain(*common, "SGHMC", 2, 0.24, *rest),
        "SGLD": plain(*common, "SGLD", 1, 0.3, *rest),
    }
    for name, run in runs.items():
        found = measures.errors(run, truth)
        assert found["mean"][0] < 4 * found["expected"], name
        assert 0.85 < found["deviation"][1] < 1.15, name
    # Without control variates the minibatches' noise heats.
    hot = samplers.gradient_method(*common, "SGHMC", 0, 0.24, 100, 50, 0, tmp_path)
    assert measures.errors(hot, truth)["deviation"][1] > 1.3


def test_order_0_does_not_stay_where_the_posterior_is(problem, laplace, tmp_path):
    """Given u, its law is elsewhere; order 2's, without the settings' order, is not."""
    size = Size(1, 300, 300, 60, 50)
    common = (problem, laplace.mode, size, 0, tmp_path)
    samplers.hmc_ecs(*common, **comparison.ECS["perturbed"])
    with pytest.raises(RuntimeError, match="has left the posterior"):
        samplers.hmc_ecs(*common, **comparison.ECS["perturbed, order 0"])


def autoregressive(rho, count, seed):
    random = np.random.default_rng(seed)
    noise = random.standard_normal(count)
    values = np.empty(count)
    values[0] = noise[0]
    for i in range(1, count):
        values[i] = rho * values[i - 1] + (1 - rho**2) ** 0.5 * noise[i]
    return values


@pytest.fixture(scope="module")
def known():
    """Autocorrelations 0.6^k, 0 and -: IF 4 and 1; 10 evaluations a draw."""
    columns = [autoregressive(rho, 20_000, i) for i, rho in enumerate((0.6, 0.0))]
    draws = np.stack(columns, axis=-1)[None]
    return Run(draws, np.ones((1, 20_000)), 200_000.0, {})


def test_inefficiency_of_known_chains(known):
    found = measures.inefficiencies(known)
    np.testing.assert_allclose(found, [4, 1], rtol=0.12)
    times = measures.computational_times(known)
    np.testing.assert_allclose(times, found * 200_000)
    # Four chains of the same law are worth as much as one of their length.
    parts = replace(known, draws=known.draws.reshape(4, 5000, 2))
    np.testing.assert_allclose(measures.inefficiencies(parts), [4, 1], rtol=0.12)


def test_relative_computational_times(known):
    dear = replace(known, evaluations=3 * known.evaluations)
    np.testing.assert_allclose(measures.relative(dear, known), 3)
    np.testing.assert_allclose(measures.relative(known, dear), 1 / 3)
    signs = known.signs.copy()
    signs[0, ::10] = -1  # (2τ - 1)² = 0.64
    signed = replace(known, signs=signs)
    np.testing.assert_allclose(measures.relative(signed, known), 1 / 0.64)
    assert measures.efficiency(signed)["positive"] == pytest.approx(0.9)
    # Half as many draws for half the evaluations: as efficient.
    half = Run(known.draws[:, :10_000], known.signs[:, :10_000], 100_000.0, {})
    np.testing.assert_allclose(measures.relative(half, known), 1, rtol=0.12)
    useless = replace(known, signs=np.tile([1.0, -1.0], 10_000)[None])
    assert np.all(np.isinf(measures.computational_times(useless)))


def test_errors_of_known_draws(known):
    mean, variance = measures.moments(known)
    truth = measures.Truth(mean - [0.5, 0.2], variance / 4, np.zeros(2))
    found = measures.errors(known, truth)
    assert found["mean"][1] == pytest.approx(2 * 0.5 / variance[0] ** 0.5)
    np.testing.assert_allclose(found["deviation"], 2)
    chance = np.mean([4, 1]) / 20_000
    assert found["expected"] == pytest.approx(chance**0.5, rel=0.1)
    # Signs weigh draws: here they leave those of the second half alone.
    signs = np.ones((1, 4))
    signs[0, 0] = -1
    draws = np.array([1.0, 1.0, 5.0, 7.0])[None, :, None]
    weighted = measures.moments(Run(draws, signs, 1.0, {}))
    np.testing.assert_allclose(weighted, [[6.0], [1.0]])


@pytest.mark.parametrize("bug", [None, "other theta", "one draw"])
def test_realised_frequencies(bug):
    """Rows of the model's own law: misfit 1, of 100 groups, to 4 standard errors.

    Each known bug is caught by one of the three numbers or more.
    """
    generator = torch.Generator().manual_seed(0)
    like = {"generator": generator, "dtype": torch.float64}
    x = torch.column_stack([torch.ones(20_000), torch.randn(20_000, **like)])
    theta = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    y = (torch.rand(20_000, **like) < torch.sigmoid(x @ theta)).float()
    data = ("known", x.float(), y, x[:0], y[:0])
    problem = Problem(*data, covariate=Covariate("x", x[:, 1]))
    spread = 0.05 * torch.randn(300, 2, **like)
    draws = (theta + spread).numpy()[None]
    hmc = Run(draws, np.ones((1, 300)), 1.0, {})
    ecs = draws.copy()
    if bug == "other theta":
        ecs += [0.3, 0.0]
    if bug == "one draw":
        ecs[:] = ecs[:, :1]
    runs = {"HMC": [hmc], "perturbed": [replace(hmc, draws=ecs)], "SGLD": [hmc]}
    found = realised.curves(problem, runs)
    assert list(found["probability"]) == ["perturbed", "HMC"]
    assert np.all(found["rows"] == 200)
    numbers = realised.numbers(found)
    close = 1 - 4 / 200**0.5 < numbers["perturbed"]["misfit"][0] < 1 + 4 / 200**0.5
    same = numbers["perturbed"]["difference"][0] < 1e-6
    wide = numbers["perturbed"]["width"][0] == pytest.approx(1)
    if bug is None:
        assert np.all(np.diff(found["place"]) > 0)
        mean, low, high = found["probability"]["HMC"][0]
        assert np.all((low < mean) & (mean < high))
        first = x[:, 1].argsort()[:200]
        p = torch.sigmoid(x[first] @ torch.from_numpy(draws[0]).T).mean(0).numpy()
        assert mean[0] == pytest.approx(p.mean(), rel=1e-6)
        assert low[0] == pytest.approx(np.quantile(p, 0.05), rel=1e-6)
    # Each bug is seen where it should be.
    assert close == (bug in (None, "one draw"))
    assert same == (bug is None)
    assert wide == (bug is None)


def test_the_variance_that_order_0_leaves(problem):
    theta = torch.full((5,), 0.2, dtype=torch.float64)
    anchor = torch.zeros(5, dtype=torch.float64)
    everybody = torch.arange(len(problem.x))
    with torch.no_grad():
        differences = problem.log_likelihoods(theta)(everybody) + np.log(2)
    found = variances.zeroth_variance(problem, theta, anchor, everybody)
    expected = float(differences.var(correction=0)) * len(problem.x)
    assert found == pytest.approx(expected)
    some = everybody[:100]
    found = variances.zeroth_variance(problem, theta, anchor, some)
    expected = 30**2 * 100 * float(differences[:100].var(correction=0))
    assert found == pytest.approx(expected)


def test_steps_are_chosen_by_the_ratio_of_deviations():
    """The longest within 3 %, else the nearest to 1."""
    assert choose({0.06: 1.01, 0.24: 0.98, 0.4: 1.04}) == 0.24
    assert choose({0.03: 0.4, 0.3: 0.8, 1.0: 2.0}) == 0.3
