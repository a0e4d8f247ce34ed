"""One experiment with everything, for the samplers that test_sampling_law.py lacks.

T ≠ 1, a prior, N data, minibatch noise where the sampler takes any, a correlated
quadratic and two tensors. Covariances are compared with the exact law: that of the
discretised chain (BAOA, SGLRW) or the target's (HMC, SBPS, HMC-ECS). Each comparison
must fail for the law of a known bug: another temperature, no prior, no minibatch noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import torch_sgmcmc as sg

F64 = torch.float64
T, PRIOR, N = 0.6, 8.0, 20
#: The curvature of the mean loss: correlated, also between the tensors.
HESSIAN = np.array([[1.0, 0.3, 0.2], [0.3, 0.8, -0.25], [0.2, -0.25, 0.6]])
#: A root of the covariance of a minibatch's gradient.
ROOT = np.array([[0.15, 0.05, 0.0], [0.0, 0.1, 0.0], [0.05, 0.0, 0.12]])
TARGET: dict[str, Any] = {
    "num_data": N,
    "prior_precision": PRIOR,
    "temperature": T,
    "seed": 5,
}


def target(temperature: float = T, prior: float = PRIOR) -> np.ndarray:
    return temperature * np.linalg.inv(N * HESSIAN + prior * np.eye(3))


def baoa_law(
    lr: float, m: float, temperature: float = T, prior: float = PRIOR, noise: float = 1
) -> np.ndarray:
    """The stationary covariance of θ: u = v - lr g, v = m u + noise, θ += (u + v)/2."""
    a, one = HESSIAN + prior / N * np.eye(3), np.eye(3)
    kick = -lr * a
    move = np.block(
        [[one + (1 + m) / 2 * kick, (1 + m) / 2 * one], [m * kick, m * one]]
    )
    injected = (1 - m**2) * lr * temperature / N
    entry = np.vstack([one / 2, one])
    kicked = np.vstack([(1 + m) / 2 * one, m * one])
    added = injected * entry @ entry.T
    added = added + noise * lr**2 * kicked @ ROOT @ ROOT.T @ kicked.T
    cov = np.zeros((6, 6))
    for _ in range(3000):
        cov = move @ cov @ move.T + added
    return cov[:3, :3]


def sglrw_law(
    lr: float, temperature: float = T, prior: float = PRIOR, noise: float = 1
) -> np.ndarray:
    """Moves of ±δ: their squares are δ², and coordinates are drawn by themselves."""
    a = HESSIAN + prior / N * np.eye(3)
    cov, size = target(temperature, prior), 2 * lr * temperature / N
    for _ in range(3000):
        products = lr**2 * (a @ cov @ a + noise * ROOT @ ROOT.T)
        np.fill_diagonal(products, size)
        cov = cov - lr * (a @ cov + cov @ a) + products
    return cov


@cache
def covariance(make: Callable[..., sg.Sampler], **settings: Any) -> np.ndarray:
    """The covariance of 20,000 chains of a sampler that goes by gradients alone."""
    chains = 20_000
    generator = torch.Generator().manual_seed(1)
    root = torch.tensor(np.linalg.cholesky(target()))
    start = torch.randn(chains, 3, dtype=F64, generator=generator) @ root.T
    p = start[:, :2].clone().requires_grad_()
    q = start[:, 2:].clone().requires_grad_()
    sampler = make([p, q], **settings, **TARGET)
    hessian, noise = torch.tensor(HESSIAN), torch.tensor(ROOT)
    total, count = np.zeros((3, 3)), 0
    for k in range(400):
        theta = torch.cat([p.detach(), q.detach()], 1)
        errors = torch.randn(chains, 3, dtype=F64, generator=generator)
        grad = theta @ hessian + errors @ noise.T
        p.grad, q.grad = grad[:, :2].contiguous(), grad[:, 2:].contiguous()
        sampler.step()
        if k >= 200 and k % 20 == 0:
            theta = torch.cat([p.detach(), q.detach()], 1)
            total, count = total + np.cov(theta.numpy().T), count + 1
    return total / count


def distance(found: np.ndarray, law: np.ndarray) -> float:
    """The largest relative error of a variance in any direction."""
    root = np.linalg.inv(np.linalg.cholesky(law))
    return float(np.abs(np.linalg.eigvalsh(root @ found @ root.T) - 1).max())


BUGS = [{"temperature": 1.0}, {"prior": 0.0}, {"noise": 0.0}]


def test_baoa() -> None:
    found = covariance(sg.BAOA, lr=0.5, momentum=0.6)
    assert distance(found, baoa_law(0.5, 0.6)) < 0.03
    for bug in BUGS:
        assert distance(found, baoa_law(0.5, 0.6, **bug)) > 0.06


def test_sglrw() -> None:
    found = covariance(sg.SGLRW, lr=0.02)
    assert distance(found, sglrw_law(0.02)) < 0.03
    for bug in BUGS[:2]:
        assert distance(found, sglrw_law(0.02, **bug)) > 0.06


def test_hmc() -> None:
    """Its gradients are of all data."""
    chains = 4000
    p = torch.zeros(chains, 2, dtype=F64, requires_grad=True)
    q = torch.zeros(chains, 1, dtype=F64, requires_grad=True)
    sampler = sg.HMC([p, q], step_size=0.1, num_steps=3, num_chains=chains, **TARGET)
    hessian = torch.tensor(HESSIAN)

    def closure() -> torch.Tensor:
        theta = torch.cat([p, q], 1)
        losses = (theta @ hessian * theta).sum(1) / 2
        losses.sum().backward()
        return losses

    found = []
    for k in range(60):
        sampler.step(closure)
        if k >= 20 and k % 4 == 0:
            found.append(np.cov(torch.cat([p, q], 1).detach().numpy().T))
    assert 0.3 < sampler.acceptance_rate < 0.999
    check(np.mean(found, axis=0), 0.06)


def check(found: np.ndarray, tolerance: float) -> None:
    """Compares with the target, and with those of bugs."""
    assert distance(found, target()) < tolerance
    for bug in BUGS[:2]:
        assert distance(found, target(**bug)) > 1.5 * tolerance


def data() -> torch.Tensor:
    """Data whose mean is 0: the mean loss is θᵀHθ/2, but for a constant."""
    x = torch.randn(N, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
    return x - x.mean(0)


def test_sbps() -> None:
    p = torch.zeros(2, dtype=F64, requires_grad=True)
    q = torch.zeros(1, dtype=F64, requires_grad=True)
    x, hessian = 0.3 * data(), torch.tensor(HESSIAN)
    generator = torch.Generator().manual_seed(3)
    sampler = sg.SBPS([p, q], sample_interval=0.05, refresh_rate=1.0, **TARGET)
    draws: list[torch.Tensor] = []
    sampler.register_sample_hook(lambda *_: draws.append(torch.cat([p, q]).detach()))

    def closure() -> torch.Tensor:
        rows = torch.randperm(N, generator=generator)[:10]
        away = torch.cat([p, q]) - x[rows]
        return (away @ hessian * away).sum(1) / 2

    for _ in range(12_000):
        sampler.step(closure)
    found = np.cov(torch.stack(draws).numpy().T)
    check(found, 0.25)


@pytest.mark.filterwarnings("ignore:num_blocks")
def test_hmcecs() -> None:
    p = torch.zeros(2, dtype=F64, requires_grad=True)
    q = torch.zeros(1, dtype=F64, requires_grad=True)
    x, hessian = data(), torch.tensor(HESSIAN)

    def closure(rows: torch.Tensor) -> torch.Tensor:
        away = torch.cat([p, q]) - x[rows]
        return -(away @ hessian * away).sum(1) / 2

    sampler = sg.HMCECS(
        [p, q],
        subsample_size=8,
        num_blocks=4,
        taylor_order=1,  # so that the subsample matters
        step_size=0.3,
        trajectory_length=1.2,
        **TARGET,
    )
    draws = []
    for k in range(4000):
        sampler.step(closure)
        if k >= 100:
            draws.append(torch.cat([p, q]).detach())
    check(np.cov(torch.stack(draws).numpy().T), 0.25)
    assert math.isfinite(sampler.estimator_variance)
