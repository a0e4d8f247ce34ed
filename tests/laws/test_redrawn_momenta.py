"""Momenta drawn afresh from N(0, lr T / N): too hot or too cold, by what moves first.

Algorithm 2 of Chen et al. (2014), as printed, moves θ first; equation 15 and the
authors' program move v first, as SGHMC does. On U = θ² / 2, N = T = 1, with k steps
between two draws, the temperatures are k / (k - 1) and k / (k + 1).
"""

import pytest
import torch

import torch_sgmcmc as sg

pytestmark = pytest.mark.full


@pytest.mark.parametrize("k", [2, 5])
def test_momenta_redrawn_given_theta_are_right(k):
    """SGHMC's redraw over 4,000 chains, beside both wrong temperatures."""
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
