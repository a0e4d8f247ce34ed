"""Momenta drawn afresh from N(0, lr T / N): too hot or too cold, by what moves first.

Algorithm 2 of Chen et al. (2014), as printed, moves θ first; equation 15 and the
authors' program move v first, as SGHMC does. On U = θ² / 2, N = T = 1, a cycle of k
steps between two draws is linear, so that its law is exact.
"""

from __future__ import annotations

import pytest
import torch

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

LR = 1e-5


def variance(k: int, *, moves_first: str) -> float:
    """Of θ in equilibrium, where each cycle begins with v ~ N(0, lr)."""
    move = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    kick = torch.tensor([[1.0, 0.0], [-LR, 1.0]], dtype=torch.float64)
    step = move @ kick if moves_first == "v" else kick @ move
    cycle = torch.linalg.matrix_power(step, k)
    # θ' = a θ + b v.
    a, b = cycle[0].tolist()
    return LR * b**2 / (1 - a**2)


@pytest.mark.parametrize("k", [2, 3, 5, 20])
def test_theta_first_is_too_hot(k: int) -> None:
    """T k / (k - 1): 2.00 at k = 2, 1.25 at k = 5."""
    expected = k / (k - 1)
    assert variance(k, moves_first="theta") == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("k", [1, 2, 5, 20])
def test_momentum_first_is_too_cold(k: int) -> None:
    """T k / (k + 1)."""
    assert variance(k, moves_first="v") == pytest.approx(k / (k + 1), rel=1e-3)


def test_theta_first_with_a_draw_at_each_step_never_sees_the_gradient() -> None:
    """A random walk: θ += v with v fresh, and what the gradient does to v is lost."""
    with pytest.raises(ZeroDivisionError):
        variance(1, moves_first="theta")


@pytest.mark.parametrize("k", [2, 5])
def test_redrawn_given_theta_it_is_right(k: int) -> None:
    """What SGHMC does instead: 4,000 chains, beside both wrong temperatures."""
    lr, chains = 0.01, 4000
    theta = torch.zeros(chains, dtype=torch.float64, requires_grad=True)
    sampler = sg.SGHMC([theta], lr, 0.99, num_data=1, seed=0, resample_momentum_every=k)
    torch.manual_seed(0)
    with torch.no_grad():
        theta.normal_()
    squares = []
    for step in range(4000):
        theta.grad = theta.detach().clone()
        sampler.step()
        if step % 400 == 399:
            squares.append(float(theta.detach().square().mean()))
    found = sum(squares) / len(squares)
    # The mean of 40,000 squares: 0.7 % is one standard error.
    assert found == pytest.approx(1.0, abs=0.03)
    assert abs(found - k / (k - 1)) > 0.15 and abs(found - k / (k + 1)) > 0.15
