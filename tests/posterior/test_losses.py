"""Losses are minus the mean log-density, which torch's distributions know."""

import pickle

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal

import torch_sgmcmc as sg


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
        (
            sg.losses.gaussian("log_noise"),
            Fixed(F, SIGMAS.log()),
            Y,
            Normal(F, SIGMAS),
        ),
        (
            sg.losses.heteroscedastic(),
            Fixed(torch.cat([F, SIGMAS.log().expand(6, 3)], 1)),
            Y,
            Normal(F, SIGMAS),
        ),
        (
            sg.losses.categorical(),
            Fixed(F),
            torch.arange(6) % 3,
            Categorical(logits=F),
        ),
        (sg.losses.bernoulli(), Fixed(F), (Y > 0).float(), Bernoulli(logits=F)),
    ],
    ids=["gaussian", "sampled noise", "heteroscedastic", "categorical", "bernoulli"],
)
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
    with pytest.raises(ValueError, match="the last dimension must have means"):
        sg.losses.heteroscedastic()(Fixed(F), (X, Y))
