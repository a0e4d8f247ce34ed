"""Small data sets and chains that the tests of HMC-ECS share."""

import torch
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core.ops import ecs_estimate
from torch_sgmcmc.samplers._ecs.subsample import Estimate

N = 60
F64 = torch.float64


class Data:
    """A regression with a weight and a bias, in two tensors."""

    def __init__(self, kind="logistic", dtype=F64):
        g = torch.Generator().manual_seed(4)
        self.x = torch.randn(N, 3, generator=g, dtype=F64).to(dtype)
        self.y = (torch.rand(N, generator=g) < 0.5).to(dtype)
        self.weight = (0.3 * torch.randn(3, generator=g, dtype=F64)).to(dtype)
        self.weight.requires_grad_()
        self.bias = torch.tensor(0.2, dtype=dtype, requires_grad=True)
        self.kind = kind
        self.seen = []

    @property
    def params(self):
        return [self.weight, self.bias]

    def predictor(self, x):
        return x @ self.weight + self.bias

    def __call__(self, indices):
        self.seen.append(indices)
        eta, y = self.predictor(self.x[indices]), self.y[indices]
        if self.kind == "logistic":
            return y * eta - nn.functional.softplus(eta)
        if self.kind == "gaussian":
            return -0.5 * (y - eta) ** 2
        if self.kind == "linear":
            return y * eta
        return -0.5 * (y - eta.tanh() * self.bias) ** 2  # Hessians of rank two


class Regression(Data):
    """The same that says what its rows are."""

    @property
    def closure(self):
        return sg.PredictorLogLikelihood(
            lambda indices: self.predictor(self.x[indices]),
            self.of_predictors,
            rows=self.rows,
        )

    def of_predictors(self, eta, indices):
        return self.y[indices] * eta - nn.functional.softplus(eta)

    def rows(self, indices):
        return nn.functional.pad(self.x[indices], (0, 1), value=1.0)


def make(data, **settings):
    common = {"num_data": N, "subsample_size": 8, "num_blocks": 4, "seed": 3}
    common.update({"prior_precision": 1.0, "step_size": 0.4})
    return sg.HMCECS(data.params, **{**common, **settings})


def chain(sampler, data, steps):
    draws = []
    for _ in range(steps):
        sampler.step(data)
        draws.append(torch.cat([p.detach().reshape(-1) for p in data.params]))
    return draws


def target_of(sampler, data):
    """Returns the density that the sampler's next step follows."""
    return sampler._target(sampler._data(data))


def estimate(estimator, differences):
    """Returns numbers and weights of an estimate from the differences ℓ - q [M]."""
    none = differences.new_empty(0)
    without_terms = torch.zeros_like(differences), none.view(0, len(differences), 0)
    weights, _, numbers = ecs_estimate(
        differences,
        none,
        none,
        *without_terms,
        None,
        None,
        temperature=1.0,
        **estimator._asdict(),
    )
    return Estimate(*numbers.tolist()), weights
