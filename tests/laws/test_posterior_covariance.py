"""One experiment with everything for SBPS and HMC-ECS.

T ≠ 1, a prior, N data, minibatches, a correlated quadratic and two tensors. Covariances
are compared with the target's. Each comparison must fail for the law of a known bug:
another temperature, no prior.
"""

import math

import numpy as np
import pytest
import torch

import torch_sgmcmc as sg

F64 = torch.float64
T, PRIOR, N = 0.6, 8.0, 20
#: The curvature of the mean loss: correlated, also between the tensors.
HESSIAN = np.array([[1.0, 0.3, 0.2], [0.3, 0.8, -0.25], [0.2, -0.25, 0.6]])
TARGET = {"num_data": N, "prior_precision": PRIOR, "temperature": T, "seed": 5}


def target(temperature=T, prior=PRIOR):
    return temperature * np.linalg.inv(N * HESSIAN + prior * np.eye(3))


def distance(found, law):
    """The largest relative error of a variance in any direction."""
    root = np.linalg.inv(np.linalg.cholesky(law))
    return float(np.abs(np.linalg.eigvalsh(root @ found @ root.T) - 1).max())


def check(found, tolerance=0.25):
    """Compares with the target, and with those of bugs."""
    assert distance(found, target()) < tolerance
    for bug in ({"temperature": 1.0}, {"prior": 0.0}):
        assert distance(found, target(**bug)) > 1.5 * tolerance


def data():
    """Data whose mean is 0: the mean loss is θᵀHθ/2, but for a constant."""
    x = torch.randn(N, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
    return x - x.mean(0)


def test_sbps():
    p = torch.zeros(2, dtype=F64, requires_grad=True)
    q = torch.zeros(1, dtype=F64, requires_grad=True)
    x, hessian = 0.3 * data(), torch.tensor(HESSIAN)
    generator = torch.Generator().manual_seed(3)
    sampler = sg.SBPS([p, q], sample_interval=0.05, refresh_rate=1.0, **TARGET)
    draws = []
    sampler.register_sample_hook(lambda *_: draws.append(torch.cat([p, q]).detach()))

    def closure():
        rows = torch.randperm(N, generator=generator)[:10]
        away = torch.cat([p, q]) - x[rows]
        return (away @ hessian * away).sum(1) / 2

    for _ in range(12_000):
        sampler.step(closure)
    check(np.cov(torch.stack(draws).numpy().T))


@pytest.mark.filterwarnings("ignore:num_blocks")
def test_hmcecs():
    p = torch.zeros(2, dtype=F64, requires_grad=True)
    q = torch.zeros(1, dtype=F64, requires_grad=True)
    x, hessian = data(), torch.tensor(HESSIAN)

    def closure(rows):
        away = torch.cat([p, q]) - x[rows]
        return -(away @ hessian * away).sum(1) / 2

    sizes = {"subsample_size": 8, "num_blocks": 4, "step_size": 0.3}
    # Of order 1, so that the subsample matters.
    sampler = sg.HMCECS(
        [p, q], **sizes, taylor_order=1, trajectory_length=1.2, **TARGET
    )
    draws = []
    for k in range(4000):
        sampler.step(closure)
        if k >= 100:
            draws.append(torch.cat([p, q]).detach())
    check(np.cov(torch.stack(draws).numpy().T))
    assert math.isfinite(sampler.estimator_variance)
