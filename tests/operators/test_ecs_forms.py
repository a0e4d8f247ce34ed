"""HMC-ECS finds the form of each datum's Hessian for any code of the model."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_sgmcmc.samplers._ecs import taylor
from torch_sgmcmc.samplers._ecs.likelihood import LikelihoodGraph
from torch_sgmcmc.samplers._ecs.taylor import (
    CONSTANT,
    LINEAR,
    WHOLE,
    TaylorSums,
    TaylorTerms,
)

F64 = torch.float64
Function = Callable[[list[Tensor], Tensor, Tensor], Tensor]


def logistic(y, eta):
    return y * eta - F.softplus(eta)


@dataclass(frozen=True)
class Model:
    function: Function
    shapes: tuple[int, ...] = (3,)


SCALES = torch.tensor([2.0, 0.5, 1.0], dtype=F64)
MODELS = {
    "products with a matrix": Model(lambda p, x, y: logistic(y, x @ p[0])),
    "a weight and a bias": Model(lambda p, x, y: logistic(y, x @ p[0] + p[1]), (3, 1)),
    "a linear layer": Model(lambda p, x, y:
     logistic(y, F.linear(x, p[0][None], p[1]).squeeze(-1)), (3, 1)),
    "sums of products": Model(lambda p, x, y: logistic(y, (x * p[0]).sum(dim=1))),
    "scaled parameters": Model(lambda p, x, y: logistic(y, x @ (SCALES * p[0]))),
    "no curvature": Model(lambda p, x, y: y * (x @ p[0])),
    "a part that is not used":
     Model(lambda p, x, y: -0.5 * (y - x @ p[1]) ** 2, (2, 3)),
    "a predictor that is computed twice":
     Model(lambda p, x, y: y * (x @ p[0]) - F.softplus(x @ p[0])),
    "a predictor that is not linear":
     Model(lambda p, x, y: logistic(y, x @ p[0].exp())),
    "another way to the parameters":
     Model(lambda p, x, y: logistic(y, x @ p[0]) - 0.1 * (p[0] ** 2).sum()),
    "two predictors": Model(lambda p, x, y: -0.5 * (y - (x @ p[0]).tanh() * p[1]) ** 2,
     (3, 1)),
}  # fmt: skip


class Fitted:
    """A model with its data and parameters, and its derivatives one by one."""

    def __init__(self, model, count=12):
        g = torch.Generator().manual_seed(8)
        self.function = model.function
        self.x = torch.randn(count, 3, generator=g, dtype=F64)
        self.y = (torch.rand(count, generator=g) < 0.5).to(F64)
        self.params = [
            torch.randn(n, generator=g, dtype=F64).requires_grad_()
            for n in model.shapes
        ]
        self.probes = torch.randn(2, sum(model.shapes), generator=g, dtype=F64)

    def __call__(self, indices):
        return self.function(self.params, self.x[indices], self.y[indices])

    def derivatives(self, i):
        sizes = [p.numel() for p in self.params]

        def value(theta):
            parts = list(theta.split(sizes))
            return self.function(parts, self.x[i : i + 1], self.y[i : i + 1])[0]

        theta = torch.cat([p.detach() for p in self.params])
        gradient = torch.autograd.functional.jacobian(value, theta)
        return value(theta), gradient, torch.autograd.functional.hessian(value, theta)

    def found(self, chunk=5):
        chunks = torch.arange(len(self.x)).split(chunk)
        return TaylorSums.at_current_params(
            self, self.params, chunks, WHOLE, self.probes[0]
        )


@pytest.mark.parametrize("name", MODELS)
def test_sums_over_all_data(name):
    fitted = Fitted(MODELS[name])
    sums = fitted.found()
    one_by_one = [fitted.derivatives(i) for i in range(len(fitted.x))]
    v, g, h = (torch.stack(part).sum(dim=0) for part in zip(*one_by_one, strict=True))
    torch.testing.assert_close(sums.value, v, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(sums.gradient, g, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(sums.hessian, h, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", [CONSTANT, LINEAR, WHOLE])
@pytest.mark.parametrize("name", MODELS)
def test_terms(name, form):
    """The order of the data is free."""
    fitted, indices = Fitted(MODELS[name]), [5, 0, 5, 11, 7]
    terms = TaylorTerms.at_current_params(
        fitted, fitted.params, torch.tensor(indices), form, fitted.probes[0]
    )
    one_by_one = [fitted.derivatives(i) for i in indices]
    v, g, h = (torch.stack(part) for part in zip(*one_by_one, strict=True))
    torch.testing.assert_close(terms.values, v)
    assert len(terms.gradients) == (form != CONSTANT)
    if form != CONSTANT:
        torch.testing.assert_close(terms.gradients[0], g, rtol=1e-10, atol=1e-12)
    assert (terms.hessians is not None) == (form == WHOLE)
    if form == WHOLE:
        torch.testing.assert_close(terms.hessians, h, rtol=1e-9, atol=1e-11)


def test_first_order_in_many_parameters(monkeypatch):
    """Estimates by data (many parameters) equal estimates by parameters."""
    fitted, indices = Fitted(MODELS["two predictors"], 20), torch.arange(20)
    both = []
    for many in (3, 4):
        monkeypatch.setattr(taylor, "_MANY", many)
        both.append(
            TaylorTerms.at_current_params(
                fitted, fitted.params, indices, LINEAR, fitted.probes[0]
            )
        )
    for ours, theirs in zip(*(terms.fields() for terms in both), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    g = torch.stack([fitted.derivatives(i)[1] for i in range(20)])
    torch.testing.assert_close(both[0].gradients[0], g)


def test_a_hessian_of_many_passes(monkeypatch):
    name = "torch_sgmcmc.samplers._ecs.likelihood._MOST_ELEMENTS"
    monkeypatch.setattr(name, 2 * (4 + 12))
    fitted = Fitted(MODELS["two predictors"])
    graph = LikelihoodGraph(fitted(torch.arange(12)), fitted.params)
    h = torch.stack([fitted.derivatives(i)[2] for i in range(12)])
    torch.testing.assert_close(graph.hessian(), h.sum(dim=0), rtol=1e-9, atol=1e-11)
    products = graph.hessian_products(fitted.probes[0])
    torch.testing.assert_close(products, h @ fitted.probes[0], rtol=1e-9, atol=1e-11)


def test_parameters_that_are_their_own_log_likelihoods():
    theta = torch.randn(4, dtype=F64, requires_grad=True)
    probes = torch.randn(2, 4, dtype=F64)
    sums = TaylorSums.at_current_params(
        lambda indices: theta, [theta], [torch.arange(4)], WHOLE, probes[0]
    )
    assert torch.equal(sums.gradient, torch.ones(4, dtype=F64))
    assert not sums.hessian.any()
