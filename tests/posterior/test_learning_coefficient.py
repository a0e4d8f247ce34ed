"""The local learning coefficient, where it is known."""

import itertools
import math
import sys
import warnings

import pytest
import torch
from every_sampler import bits
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc import local_learning_coefficient

pytestmark = pytest.mark.full


def sghmc(params, **target):
    return sg.SGHMC(params, lr=0.05, momentum=0.9, **target)


def test_the_formula():
    """Closed cases: regular models, and a b x with ab = 0."""
    assert learning_coefficient((5, 4), 4) == 10
    assert learning_coefficient((5, 3, 4), 3) == 3 * (5 + 4 - 3) / 2
    assert learning_coefficient((1, 1, 1), 0) == 0.5
    assert learning_coefficient((2, 2, 2), 0) == 1.5


LINEAR = {"num_data": 100_000, "localization": 10.0, "burn_in": 400}
LINEAR |= {"seed": 0, "progress": False}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sizes", "rank", "draws"),
    [((5, 4), 4, 1500), ((5, 3, 4), 3, 1500), ((4, 4, 4), 2, 3000)],
    ids=["regular", "bottleneck", "rank lacking"],
)
def test_linear_networks(sizes, rank, draws):
    weights, loss = linear_network(sizes, rank)
    result = local_learning_coefficient(weights, loss, sghmc, draws=draws, **LINEAR)
    expected = learning_coefficient(sizes, rank)
    assert result.warnings == ()
    assert result.value == pytest.approx(expected, rel=0.05)
    dimension = sum(w.numel() for w in weights)
    if len(sizes) > 2:
        assert result.value < 0.7 * dimension / 2


class Regression:
    """Ten weights of a linear regression at their least squares."""

    def __init__(self, n=2000):
        g = torch.Generator().manual_seed(2)
        self.x = torch.randn(n, 10, generator=g)
        self.y = self.x @ torch.ones(10) + torch.randn(n, generator=g)
        solution = torch.linalg.lstsq(self.x, self.y[:, None]).solution[:, 0]
        self.weight = nn.Parameter(solution)
        self.n = n

    def loss(self, indices):
        residual = self.y[indices] - self.x[indices] @ self.weight
        return residual.square().mean() / 2

    def estimate(self, sampler, **settings):
        shared = {"num_data": self.n, "localization": 1.0, "seed": 3}
        shared |= {"burn_in": 100, "draws": 400, "progress": False}
        shared.update(settings)
        return local_learning_coefficient([self.weight], self.loss, sampler, **shared)


SAMPLERS = {
    "SGLD": lambda p, **t: sg.SGLD(p, lr=0.1, **t),
    "SGNHT": lambda p, **t: sg.SGNHT(p, lr=0.05, **t),
    "PSGLD": lambda p, **t: sg.PSGLD(p, lr=0.02, eps=0.1, **t),
    "PSGLD without Γ": lambda p, **t: sg.PSGLD(p, 0.02, eps=0.1, gamma=False, **t),
    "EWSG": lambda p, **t: sg.EWSG(p, lr=0.05, **t),
    "HMC": lambda p, **t: sg.HMC(p, 0.03, num_steps=5, **t),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_of_every_sampler(kind):
    """A regular model: d/2, by minibatches but for HMC."""
    issue = Regression()
    start, grad = issue.weight.detach().clone(), torch.ones(10)
    issue.weight.grad = grad
    # HMC's gradients are of all data, and its draws nearly independent.
    batch_size, draws = (None, 100) if kind == "HMC" else (400, 400)
    result = issue.estimate(SAMPLERS[kind], batch_size=batch_size, draws=draws)
    assert abs(result.value - 5) < result.half_width + 0.5
    assert result.half_width < 1
    assert result.traces.shape == (4, draws)
    assert result.chains == pytest.approx(result.traces.mean(1))
    loss = float(issue.loss(torch.arange(issue.n)).detach())
    assert result.initial_loss == pytest.approx(loss, rel=0.02)
    assert bits(issue.weight.detach()) == bits(start)
    assert issue.weight.grad is grad


def test_a_localization_that_holds_directions_fast():
    """½ nβh / (nβh + γ) of each."""
    issue = Regression()
    n_beta = issue.n / math.log(issue.n)
    hessian = issue.x.T @ issue.x / issue.n
    curvatures = n_beta * torch.linalg.eigvalsh(hessian)
    expected = float((0.5 * curvatures / (curvatures + 300)).sum())
    assert expected < 3
    result = issue.estimate(sghmc, localization=300.0, draws=1500)
    assert abs(result.value - expected) < result.half_width + 0.15
    assert result.half_width < 0.4


@pytest.mark.parametrize("layer", [0, 1])
def test_of_a_part_of_the_parameters(layer):
    """One layer of 4-4-4 at rank 2 is a regression, in 2 · 4 directions of its 16.

    So λ is 4, and not d/2 = 8. (Of both layers it is 7.5, and not the sum.)
    """
    weights, loss = linear_network((4, 4, 4), 2)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    before = [bits(w.detach()) for w in weights]
    given = [weights[layer]]
    result = local_learning_coefficient(given, loss, sghmc, draws=1500, **LINEAR)
    assert result.warnings == ()
    assert abs(result.value - 4) < result.half_width + 0.05
    assert result.half_width < 0.3
    assert [bits(w.detach()) for w in weights] == before
    assert all(bool((w.grad == 1).all()) for w in weights)  # of the other too


def test_it_repeats_itself():
    issue = Regression()
    first = issue.estimate(sghmc, draws=20, batch_size=50)
    second = issue.estimate(sghmc, draws=20, batch_size=50)
    assert bits(first.traces) == bits(second.traces)
    other = issue.estimate(sghmc, draws=20, batch_size=50, seed=4)
    assert bits(first.traces) != bits(other.traces)
    assert len({*map(str, first.chains.tolist())}) == 4


@pytest.mark.filterwarnings("ignore:The estimate is negative")
def test_issues_are_named():
    issue = Regression()
    with pytest.warns(UserWarning, match="diverged"):
        result = issue.estimate(lambda p, **t: sg.SGLD(p, lr=3.0, **t), draws=300)
    assert not math.isfinite(result.value)
    assert "diverged" in result.summary()
    with torch.no_grad():
        issue.weight.add_(1.0)  # no minimum
    with pytest.warns(UserWarning, match="negative"):
        result = issue.estimate(sghmc)
    assert result.value < 0
    with pytest.warns(UserWarning, match="have not settled"):
        issue.estimate(lambda p, **t: sg.SGLD(p, lr=1e-3, **t), burn_in=0)
    with pytest.warns(UserWarning, match=r"Chains \[0, 1, 2, 3\] do not move"):
        issue.estimate(
            lambda p, **t: sg.HMC(p, step_size=9.0, num_steps=2, **t), batch_size=None
        )


def test_heat_is_said():
    """λ = 5: where minibatches heat, the interval misses it, and that is said."""
    issue = Regression()
    options = {"batch_size": 50, "draws": 400}
    with pytest.warns(UserWarning, match="above the target's temperature: T_kin"):
        hot = issue.estimate(lambda p, **t: sg.SGLD(p, lr=0.1, **t), **options)
    assert hot.value - hot.half_width > 5
    heat = float(hot.temperatures[:, 0].mean())
    assert abs(hot.value / (5 * heat) - 1) < 0.15
    assert "thermostat_rate=1e-2" in hot.summary()
    with pytest.warns(UserWarning, match="Chains are above the target's temperature"):
        issue.estimate(lambda p, **t: sg.SGNHT(p, lr=0.02, **t), **options)
    right = {
        "SGNHT": lambda p, **t: sg.SGNHT(p, lr=0.02, thermostat_rate=1e-2, **t),
        "all data": lambda p, **t: sg.SGHMC(p, lr=0.01, **t),
    }
    for name, sampler in right.items():
        if name == "all data":
            options["batch_size"] = None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = issue.estimate(sampler, **options)
        assert abs(result.value - 5) < result.half_width + 0.15
        assert result.temperatures.shape == (4, 2)


def test_chains_out_of_equilibrium_are_said():
    issue = Regression()
    with pytest.warns(UserWarning, match="not in equilibrium: T_conf is"):
        issue.estimate(lambda p, **t: sg.SGLD(p, lr=1e-4, **t), burn_in=0)


def test_errors():
    issue = Regression()
    start = issue.weight.detach().clone()

    def refused(words, sampler=sghmc, **settings):
        with pytest.raises((TypeError, ValueError)) as info:
            issue.estimate(sampler, **settings)
        assert words in str(info.value)
        assert bits(issue.weight.detach()) == bits(start)

    refused("Invalid localization: 0.0 (must be finite and > 0)", localization=0.0)
    refused("Invalid chains: 1 (must be >= 2)", chains=1)
    refused("Invalid batch_size: 2001", batch_size=2001)
    refused("Invalid inverse_temperature: 0", inverse_temperature=0.0)
    refused("HMC needs all data", SAMPLERS["HMC"], batch_size=10)
    refused("must be a sampler, and not SBPS", lambda p, **_: torch.optim.SGD(p, 0.1))
    refused(
        "it has temperature 1.0",
        lambda p, **t: sg.SGLD(p, lr=0.1, **{**t, "temperature": 1.0}),
    )
    refused(
        "lacks the prior_mean",
        lambda p, **t: sg.SGLD(p, lr=0.1, **{**t, "prior_mean": 0.0}),
    )
    issue.loss = lambda indices: torch.ones(3)
    refused("Invalid loss: [3] (must be a scalar")


def test_the_picture(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    result = Regression().estimate(sghmc, draws=40)
    figure = result.plot()
    left, right = figure.axes
    traces = [line.get_ydata() for line in left.lines]
    assert [y.tolist() for y in traces] == result.traces.tolist()
    *chains, every, _ = (line.get_ydata() for line in right.lines)
    assert [y[-1] for y in chains] == pytest.approx(result.chains.tolist())
    assert every[-1] == pytest.approx(result.value)
    (band,) = right.collections
    last = band.get_paths()[0].vertices
    heights = last[last[:, 0] == 40, 1]
    width = pytest.approx(2 * result.half_width)
    assert heights.max() - heights.min() == width
    matplotlib.pyplot.close(figure)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"LearningCoefficient\.plot\(\) needs"):
        result.plot()


def learning_coefficient(sizes, rank):
    """λ of a network of these widths, the true map having this rank.

    M. Aoyagi, Consideration on the Learning Efficiency of Multiple-Layered Neural
    Networks with Linear Units, Neural Networks 172, 2024, theorem 1.
    """
    excess = [size - rank for size in sizes]
    places = range(len(sizes))
    for count in range(2, len(sizes) + 1):
        for chosen in itertools.combinations(places, count):
            inner = [excess[i] for i in chosen]
            rest = [excess[i] for i in places if i not in chosen]
            hidden, total = count - 1, sum(inner)
            fits = total >= hidden * max(inner) and all(
                max(inner) < other and total < hidden * other for other in rest
            )
            if not fits:
                continue
            a = total - ((total + hidden - 1) // hidden - 1) * hidden
            pairs = (total**2 - sum(m * m for m in inner)) / 2
            return (
                (rank * (sizes[0] + sizes[-1]) - rank**2) / 2
                + a * (hidden - a) / (4 * hidden)
                - hidden * (hidden - 1) / 4 * (total / hidden) ** 2
                + pairs / 2
            )
    raise AssertionError("there is always one")


def linear_network(sizes, rank):
    """Weights, and the expected loss, with inputs N(0, I) and unit noise.

    At the weights the loss is least. They are in balance: all have the rank of the map.
    """
    g = torch.Generator().manual_seed(1)
    squares = (torch.randn(size, size, generator=g).double() for size in sizes)
    turns = [torch.linalg.qr(square)[0] for square in squares]
    weights, product = [], torch.eye(sizes[0], dtype=torch.float64)
    for i in range(len(sizes) - 1):
        core = torch.zeros(sizes[i + 1], sizes[i], dtype=torch.float64)
        core[:rank, :rank] = torch.eye(rank)
        weights.append(nn.Parameter(turns[i + 1] @ core @ turns[i].T))
        product = weights[-1].detach() @ product

    def loss(indices):
        result = weights[0]
        for weight in weights[1:]:
            result = weight @ result
        return (result - product).square().sum() / 2

    return weights, loss
