"""Control variates of second order: unbiased, small variance, and the exact law."""

import numpy as np
import pytest
import torch
from harness.methods import sgld_law
from harness.statistics import StatisticalError, check_gaussian
from harness.targets import Quadratic
from hmcecs2019.second_order import SecondOrder
from levels import at_levels
from torch import nn

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

F64 = torch.float64

BUGS = (
    "of first order",
    "Hessian's term of the minibatch added",
    "Hessian's terms with the other sign",
    "Hessian's term of all data left out",
    "Hessian of all data counted twice",
    "Hessian of another minibatch",
)


class WrittenOut(SecondOrder):
    """The estimate by separate evaluations, or a bug of that."""

    bug: str | None = None

    def backward(self, batch):
        bug, delta = self.bug, self.theta.detach() - self.anchor
        at = self.anchor.clone().requires_grad_()
        # Of another chain.
        other = batch.roll(1, 0) if bug == "Hessian of another minibatch" else batch
        slope = self._gradient(at, other, create_graph=True)
        (term,) = torch.autograd.grad(slope, at, delta)
        full = self.hessian @ delta
        if bug == "of first order":
            term, full = torch.zeros_like(term), torch.zeros_like(full)
        if bug == "Hessian's term of the minibatch added":
            term = -term
        if bug == "Hessian's terms with the other sign":
            term, full = -term, -full
        if bug == "Hessian's term of all data left out":
            full = torch.zeros_like(full)
        if bug == "Hessian of all data counted twice":
            full = 2 * full
        difference = self._gradient(self.theta, batch) - self._gradient(at, batch)
        self.theta.grad = difference - term + self.gradient + full


def logistic(theta, batch):
    return nn.functional.softplus(-batch @ theta).mean()


def problem():
    g = torch.Generator().manual_seed(1)
    data = torch.randn(7, 3, generator=g, dtype=F64)
    theta = nn.Parameter(torch.randn(3, generator=g, dtype=F64))
    estimator = SecondOrder(theta, logistic)
    estimator.set_anchor((part, len(part)) for part in data.split(3))
    return data, theta, estimator


def test_sums_over_all_data():
    data, theta, estimator = problem()
    at = theta.detach()
    gradient = torch.func.grad(logistic)(at, data)
    torch.testing.assert_close(estimator.gradient, gradient, rtol=1e-12, atol=1e-13)
    hessian = torch.func.hessian(logistic)(at, data)
    torch.testing.assert_close(estimator.hessian, hessian, rtol=1e-12, atol=1e-13)


def test_unbiased_with_a_variance_like_the_fourth_power():
    data, theta, estimator = problem()
    anchor, direction = theta.detach().clone(), torch.tensor([1.0, -2.0, 0.5]).double()
    traces = []
    for size in (0.01, 0.02):
        theta.data = anchor + size * direction
        seen = []
        for datum in data:
            estimator.backward(datum[None])
            assert theta.grad is not None
            seen.append(theta.grad.clone())
        full = torch.func.grad(logistic)(theta.detach(), data)
        estimates = torch.stack(seen)
        torch.testing.assert_close(estimates.mean(0), full, rtol=1e-12, atol=1e-13)
        traces.append(float(estimates.var(dim=0, correction=0).sum()))
    assert traces[1] / traces[0] == pytest.approx(16, rel=0.1)


SETTINGS = {
    "num_data": 40,
    "prior_precision": 12.0,
    "prior_mean": 0.0,
    "temperature": 0.8,
}


def check_least_squares(kind, bug=None):
    """A slope, by minibatches of 2 out of 40 from an anchor far away.

    The loss is quadratic with another curvature for each datum: gradients are the full
    one with order 2 alone.
    """
    chains, steps = 400, 60
    g = torch.Generator().manual_seed(0)
    x = 0.5 + torch.rand(40, generator=g, dtype=F64)
    data = torch.stack([x, 2 * x + torch.randn(40, generator=g, dtype=F64)], 1)
    theta = nn.Parameter(torch.full((chains,), 3.0, dtype=F64))
    curvature = float(x.square().mean())
    settings = {**SETTINGS, "lr": 0.4 / curvature}
    sampler = sg.SGLD([theta], **settings, seed=1)

    def loss(at, batch):
        a, b = batch.unbind(-1)
        return 0.5 * (a * at[:, None] - b).square().mean(1).sum()

    uniform = sg.IndependentBatchSampler(40, 2, seed=2)
    estimator = kind(theta, loss)
    estimator.bug = bug
    estimator.set_anchor([(data[:15], 15), (data[15:], 25)])
    for _ in range(steps):
        estimator.backward(data[uniform.draw(chains)])
        sampler.step()
    product = float(data.prod(1).mean())
    target = Quadratic(np.eye(1) * curvature, np.full(1, product / curvature))
    law = sgld_law(target, {k: np.full(1, float(v)) for k, v in settings.items()})
    assert law.cycle.radius() ** steps < 1e-5
    mean, cov = law.cycle.stationary()
    samples = theta.detach().numpy()[:, None]
    check_gaussian(samples, label="order 2", mean=mean, cov=cov)


@pytest.mark.parametrize("kind", [SecondOrder, WrittenOut])
def test_least_squares(kind):
    check_least_squares(kind)


@pytest.mark.parametrize("bug", at_levels(BUGS, full=BUGS[:1]))
def test_bugs_are_caught(bug):
    with pytest.raises(StatisticalError):
        check_least_squares(WrittenOut, bug)
