"""Losses are minus the mean log-density, which torch's distributions know; scores."""

import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, MixtureSameFamily, Normal

import torch_sgmcmc as sg
from torch_sgmcmc import scoring


class Fixed(nn.Module):
    """Outputs that do not depend on x, and log σ."""

    def __init__(self, outputs, log_noise=0.0):
        super().__init__()
        self.outputs = nn.Parameter(outputs)
        self.log_noise = nn.Parameter(torch.as_tensor(log_noise))

    def forward(self, x):
        return self.outputs


torch.manual_seed(0)
X, F = torch.zeros(6, 1), torch.randn(6, 3)
Y = torch.randn(6, 3)
SIGMAS = torch.tensor([0.2, 1.0, 3.0])


@pytest.mark.parametrize(
    ("loss", "model", "targets", "density"),
    [
        (sg.losses.gaussian(0.3), Fixed(F), Y, Normal(F, 0.3)),
        (sg.losses.gaussian("log_noise"), Fixed(F, SIGMAS.log()), Y, Normal(F, SIGMAS)),
        (sg.losses.heteroscedastic(),
         Fixed(torch.cat([F, SIGMAS.log().expand(6, 3)], 1)), Y, Normal(F, SIGMAS)),
        (sg.losses.categorical(), Fixed(F), torch.arange(6) % 3, Categorical(logits=F)),
        (sg.losses.bernoulli(), Fixed(F), (Y > 0).float(), Bernoulli(logits=F)),
    ],
)  # fmt: skip
def test_is_a_log_density(loss, model, targets, density):
    exact = -density.log_prob(targets).sum() / 6
    torch.testing.assert_close(loss(model, (X, targets)), exact)
    again = pickle.loads(pickle.dumps(loss))  # for processes
    assert torch.equal(again(model, (X, targets)), loss(model, (X, targets)))


def test_noise_is_sampled_and_found_again():
    """σ of 4,000 data, by a chain that begins at another."""
    torch.manual_seed(0)
    y = 0.5 * torch.randn(4000, 1)
    model = Fixed(torch.zeros(4000, 1), 0.0)
    model.outputs.requires_grad_(False)
    sampler = sg.SGHMC([model.log_noise], 0.05, 0.9, num_data=4000, seed=0)
    loss, sigmas = sg.losses.gaussian("log_noise"), []
    for step in range(1500):
        sampler.zero_grad()
        loss(model, (torch.zeros(4000, 1), y)).backward()
        sampler.step()
        if step >= 500:
            sigmas.append(float(model.log_noise.detach().exp()))
    found = torch.tensor(sigmas)
    # log σ has the standard deviation 1 / √(2 · 4000); some 60 draws are independent.
    exact, spread = float(y.square().mean().sqrt()), 0.5 / 8000**0.5
    assert abs(float(found.mean()) - exact) < 4 * spread / 60**0.5
    assert 0.6 < float(found.std()) / spread < 1.6


def test_errors():
    with pytest.raises(ValueError, match="Invalid noise: 0"):
        sg.losses.gaussian(0)
    with pytest.raises(ValueError, match=r"Invalid targets: shape \[6\] .* \[6, 1\]"):
        sg.losses.gaussian()(Fixed(F[:, :1]), (X, Y[:, 0]))
    with pytest.raises(ValueError, match="the model has no parameter 'sigma'"):
        sg.losses.gaussian("sigma")(Fixed(F), (X, Y))
    with pytest.raises(ValueError, match="the last dimension must have means"):
        sg.losses.heteroscedastic()(Fixed(F), (X, Y))


class Line(nn.Module):
    """f(x) = a x, with log σ beside it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1, 2))
        self.log_noise = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x @ self.a


INPUTS = torch.linspace(-1, 1, 7)[:, None]
TARGETS = torch.cat([INPUTS, INPUTS.sin()], 1) + 0.3
TARGETS[:2, 1] += 2.0
NOISY = sg.losses.gaussian("log_noise")


def some_draws(count=30):
    generator = torch.Generator().manual_seed(3)

    def draw():
        a = 1 + 0.3 * torch.randn(1, 2, generator=generator)
        return {"a": a, "log_noise": -1 + 0.2 * torch.randn(2, generator=generator)}

    return [draw() for _ in range(count)]


def mixture(draws):
    """Log likelihoods of all draws, for each input and output, by torch."""
    means = torch.stack([INPUTS @ d["a"] for d in draws], -1).double()
    sigmas = torch.stack([d["log_noise"].exp().expand(7, 2) for d in draws], -1)
    weights = Categorical(torch.ones_like(means))
    return MixtureSameFamily(weights, Normal(means, sigmas.double()))


def test_variances_of_new_data():
    draws = some_draws()
    found = sg.predict(Line(), draws, INPUTS, likelihood=NOISY)
    exact = mixture(draws)
    torch.testing.assert_close(found.mean.double(), exact.mean)
    torch.testing.assert_close(found.total.double(), exact.variance)
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic)
    assert torch.equal(found.epistemic, found.variance)
    assert "variance" in repr(found) and "nats" not in repr(found)
    known = sg.losses.gaussian(0.5)
    fixed = sg.predict(Line(), draws, INPUTS, likelihood=known)
    torch.testing.assert_close(fixed.aleatoric, torch.full((7, 2), 0.25))
    assert torch.equal(fixed.mean, found.mean)


def test_outputs_of_one_dimension():
    draws = some_draws()
    options = {"likelihood": sg.losses.gaussian(0.5)}
    flat = sg.predict(Line(), draws, INPUTS, forward=lambda m, x: m(x)[:, 0], **options)
    found = sg.predict(Line(), draws, INPUTS, **options)
    assert torch.equal(flat.mean, found.mean[:, :1])
    assert torch.equal(flat.total, found.total[:, :1])
    first = partial(scoring.regression_scores, Line(), draws, INPUTS, **options)
    flat, column = (
        first(y, forward=lambda m, x, own=own: m(x)[:, own])
        for y, own in ((TARGETS[:, 0], 0), (TARGETS[:, :1], slice(1)))
    )
    assert str(flat) == str(column)


def test_scores_of_mixtures():
    draws = some_draws()
    found = scoring.regression_scores(Line(), draws, INPUTS, TARGETS, NOISY)
    exact = mixture(draws)
    y = TARGETS.double()
    assert found.rmse == pytest.approx(float((exact.mean - y).square().mean().sqrt()))
    ranks = exact.cdf(y)
    inside = ((ranks > 0.05) & (ranks < 0.95)).double().mean()
    assert found.coverage == float(inside) < 1
    # Outputs of an input share a draw: a mixture of products, not a product of them.
    laws = [Normal(INPUTS @ d["a"], d["log_noise"].exp()) for d in draws]
    joint = torch.stack([law.log_prob(TARGETS).sum(1) for law in laws])
    nll = math.log(len(draws)) - float(joint.logsumexp(0).mean())
    assert found.nll == pytest.approx(nll, rel=1e-5)
    # CRPS is the integral of (cdf - [y <= t])².
    grid = torch.linspace(-6, 6, 24_001, dtype=torch.float64)
    steps = (y <= grid[:, None, None]).double()
    squares = (exact.cdf(grid[:, None, None]) - steps).square()
    crps = float(torch.trapezoid(squares, grid, dim=0).mean())
    assert found.crps == pytest.approx(crps, rel=1e-4)
    assert "CRPS" in str(found)


def test_likelihoods_by_name():
    draws = some_draws()
    plain = sg.predict(Line(), draws, INPUTS, link="identity")
    named = sg.predict(Line(), draws, INPUTS, likelihood="regression")
    assert torch.equal(named.mean, plain.mean) and named.total is None
    both = sg.predict(Line(), draws, INPUTS, likelihood="heteroscedastic")
    assert both.mean.shape == (7, 1)
    torch.testing.assert_close(both.mean, plain.mean[:, :1])
    classes = sg.predict(Line(), draws, INPUTS, likelihood="classification")
    assert torch.equal(classes.mean, sg.predict(Line(), draws, INPUTS).mean)
    with pytest.raises(ValueError, match="Invalid likelihood: 'poisson'"):
        sg.predict(Line(), draws, INPUTS, likelihood="poisson")
    with pytest.raises(ValueError, match="link or likelihood"):
        sg.predict(Line(), draws, INPUTS, likelihood="regression", link="sigmoid")
    with pytest.raises(ValueError, match="must be Gaussian, with its noise"):
        scoring.regression_scores(Line(), draws, INPUTS, TARGETS, "regression")
    with pytest.raises(ValueError, match=r"Invalid targets: shape \[7\]"):
        scoring.regression_scores(Line(), draws, INPUTS, TARGETS[:, 0], NOISY)
    with pytest.raises(TypeError, match="Invalid weights"):
        scoring.regression_scores(Line(), draws, INPUTS, TARGETS, NOISY, weights=[1])
    with pytest.raises(TypeError, match=r"losses\.gaussian"):
        sg.losses.likelihood_of("regression")(Line(), (INPUTS, TARGETS))


def issue(rows=400, classes=5):
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(rows, classes, generator=g)
    y = torch.multinomial((0.6 * logits).softmax(1), 1, generator=g)[:, 0]
    return logits.softmax(1), y


def test_wrong_arguments():
    p, y = issue(10)
    for arguments, error, match in (
        ((p.log(), y), ValueError, "Invalid probabilities: row 0 is"),
        ((2 * p, y), ValueError, "must be >= 0 and sum to 1"),
        ((p / float("nan"), y), ValueError, "row 0"),
        ((p[:, :1], y), ValueError, r"shape \[10, 1\]"),
        ((p, y[:9]), ValueError, r"Invalid targets: shape \[9\] .must be \[10\]"),
        ((p, y + 5), ValueError, r"must be in \[0, 4\]"),
        ((p, y.float()), TypeError, "Tensor of integers"),
        ((p.long(), y), TypeError, "floating dtype"),
    ):
        with pytest.raises(error, match=match):
            scoring.plot_reliability(*arguments)
    for distance in (scoring.total_variation, scoring.agreement):
        with pytest.raises(ValueError, match="must be >= 0 and sum to 1"):
            distance(p, 2 * p)
        with pytest.raises(ValueError, match=r"\[9, 5\] .must be \[10, 5\]"):
            distance(p, p[:9])
    with pytest.raises(ValueError, match="Invalid bins"):
        scoring.plot_reliability(p, y, bins=0)
    with pytest.raises(ValueError, match="'a' has no numbers, or some that are not"):
        scoring.plot_entropies({"a": torch.tensor([float("nan")])})


def test_distances_of_predictions():
    """Equal and disjoint distributions, and softmax(z) against softmax(-z)."""
    p, _ = issue(50)
    assert scoring.total_variation(p, p) == 0
    assert scoring.agreement(p, p) == 1
    first, last = torch.eye(3)[[0, 0]], torch.eye(3)[[2, 0]]
    assert scoring.total_variation(first, last) == 0.5
    assert scoring.agreement(first, last) == 0.5
    z = torch.linspace(-2, 2, 41, dtype=torch.float64)
    two = torch.stack([-z, z], 1) / 2
    assert scoring.total_variation(two.softmax(1), (-two).softmax(1)) == pytest.approx(
        float((z / 2).tanh().abs().mean()), rel=1e-12
    )
    one = z.sigmoid()  # of the second class
    assert scoring.total_variation(one, 1 - one) == pytest.approx(
        float((2 * one - 1).abs().mean()), rel=1e-12
    )
    assert scoring.agreement(one[:20], 1 - one[:20]) == 0


def test_pictures():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    p, y = issue(2000)
    figure = scoring.plot_reliability({"a": p, "b": p**2 / (p**2).sum(1, True)}, y)
    (axes,) = figure.axes
    _, first, second = axes.lines
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["a", "b"]
    # From the points the calibration error again, but for what was left out.
    confidence, label = p.max(1)
    for x, accuracy in zip(first.get_xdata(), first.get_ydata(), strict=True):
        b = -(-x * 15 // 1) - 1
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        assert int(inside.sum()) >= 20
        assert float((label == y)[inside].double().mean()) == pytest.approx(accuracy)
    assert len(second.get_xdata()) > 5
    entropies = torch.special.entr(p).sum(1)
    figure = scoring.plot_entropies({"in": entropies, "out": entropies + 1})
    assert len(figure.axes[0].patches) == 2
    # Of two classes one number is enough.
    one, both = (
        scoring.plot_reliability(of, (y == 1).long()).axes[0].lines[1]
        for of in (p[:, 1], torch.stack([1 - p[:, 1], p[:, 1]], 1))
    )
    assert one.get_ydata().tolist() == both.get_ydata().tolist()
    figure, axes = matplotlib.pyplot.subplots()
    assert scoring.plot_reliability(p, y, axes=axes) is figure
    matplotlib.pyplot.close("all")
