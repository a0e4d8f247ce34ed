"""Control variates of second order: unbiased, small variance, and the exact law."""

import numpy as np
import pytest
import torch
from harness.methods import sgld_law
from harness.statistics import StatisticalError, check_gaussian
from harness.targets import Quadratic
from hmcecs2019.second_order import SecondOrder
from torch import nn

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

F64 = torch.float64


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


SETTINGS = {"num_data": 40, "prior_precision": 12.0, "temperature": 0.8}
SETTINGS["prior_mean"] = 0.0


def check_least_squares(with_hessian=True):
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
    estimator = SecondOrder(theta, loss)
    estimator.set_anchor([(data[:15], 15), (data[15:], 25)])
    estimator.hessian *= with_hessian
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


def test_least_squares():
    check_least_squares()


def test_a_bug_is_caught():
    """The Hessian's term of all data is left out."""
    with pytest.raises(StatisticalError):
        check_least_squares(with_hessian=False)
