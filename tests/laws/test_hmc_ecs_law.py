"""The law of HMC-ECS: error of the perturbed target, and regressions beside HMC."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.ecs import PERTURBED
from harness.statistics import check_z
from levels import at_levels

import torch_sgmcmc as sg

pytestmark = pytest.mark.full


def test_the_perturbation_falls_with_the_subsample():
    model = PERTURBED.model
    far = []
    for m in (2, 4):
        law = replace(PERTURBED, model=replace(model, m=m)).law
        far.append(0.5 * np.abs(law - model.law()).sum())
    # O(1 / m²), see eq. 4.6 of the paper.
    assert far[0] > 0.1
    assert far[1] < 0.3 * far[0]


def poisson(eta, y):
    return y * eta - eta.exp()


def logistic(eta, y):
    return y * eta - torch.nn.functional.softplus(eta)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (logistic, {"subsample_size": 10, "estimator": "signed", "num_factors": 40}),
        *at_levels(
            [
                (logistic, {"subsample_size": 100}),
                (poisson, {"subsample_size": 100}),
                # m so large that the first order's perturbation is far below the error.
                (
                    lambda eta, y: -0.5 * (y - eta) ** 2,
                    {"subsample_size": 300, "taylor_order": 1},
                ),
            ]
        ),
    ],
)
def test_regressions_against_hmc(kind, settings):
    n, d, g = 400, 3, torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    x[:, 0] = 1
    eta = x @ torch.tensor([0.3, -0.5, 0.4], dtype=torch.float64)
    if kind is logistic:
        y = torch.bernoulli(torch.sigmoid(eta), generator=g)
    elif kind is poisson:
        y = torch.poisson(eta.exp(), generator=g)
    else:
        y = eta + torch.randn(n, generator=g, dtype=torch.float64)

    def loss(theta):  # U / n, for theta of shape [..., d]
        return -kind(theta @ x.t(), y).mean(dim=-1)

    mode = torch.zeros(d, dtype=torch.float64)
    eye = torch.eye(d, dtype=torch.float64)
    for _ in range(20):
        slope = n * torch.func.grad(loss)(mode) + mode
        hessian = n * torch.func.hessian(loss)(mode) + eye
        mode = mode - torch.linalg.solve(hessian, slope)
    chains = mode.repeat(400, 1).requires_grad_()
    hmc = sg.HMC(
        [chains], 0.3, num_steps=5, num_data=n, prior_precision=1.0,
        num_chains=400, seed=1,
    )  # fmt: skip
    hmc.set_mass([hessian.diagonal()])

    def losses():
        values = loss(chains)
        values.sum().backward()
        return values

    kept = []
    for i in range(40):
        hmc.step(losses)
        if i >= 10:
            kept.append(chains.detach().clone().numpy())
    exact = np.stack(kept).reshape(-1, 400, d)
    mean, sd = exact.mean(axis=(0, 1)), exact.std(axis=(0, 1))

    p = torch.tensor(mean, dtype=torch.float64).requires_grad_()
    sampler = sg.HMCECS([p], num_data=n, prior_precision=1.0, seed=2,
                        trajectory_length=1.6, num_blocks=10, **settings)  # fmt: skip

    def closure(indices):
        return kind(x[indices] @ p, y[indices])

    sampler.warmup(closure, 100, progress=False)
    draws, signs = np.empty((1000, d)), np.empty((1000, 1))
    for i in range(1000):
        sampler.step(closure)
        draws[i], signs[i] = p.detach().numpy(), sampler.sign
    scaled = (draws - mean) / sd
    # As stretches of ten steps; the error of HMC's own moments is added to theirs.
    z, theirs = (
        np.concatenate([values, values**2 - 1], axis=-1)
        for values in (scaled, (exact - mean) / sd)
    )
    ours = (signs * z).reshape(100, -1, 2 * d).mean(axis=1)
    other = theirs.mean(axis=0)
    error = np.sqrt(ours.var(axis=0, ddof=1) / 100 + other.var(axis=0) / 400)
    check_z({"moments": ours.mean(axis=0) / error}, label="regression")
    assert np.mean(signs) > 0.9
    assert sampler.acceptance_rate > 0.6
