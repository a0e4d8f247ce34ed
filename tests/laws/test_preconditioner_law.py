"""SGHMC and BAOA with a frozen preconditioner: the exact law of their chains.

The target is a correlated Gaussian of condition number 10⁴ in two tensors, of which G
either makes a round one or has nothing to do with it.
"""

import numpy as np
import pytest
import torch
from harness.statistics import AffineMap, StatisticalError, check_gaussian
from torch import nn

import torch_sgmcmc as sg

CHAINS, START = 50_000, 0.6
TARGET = {"num_data": 20.0, "temperature": 0.7, "prior_precision": 3.0}
HEAT, PULL = 0.7 / 20, 3.0 / 20
MOMENTUM, PRIOR_MEAN = 0.6, 0.5
# The mean loss is (θ - CENTRE)ᵀ H (θ - CENTRE) / 2, with H + PULL of DIAGONAL.
DIAGONAL = np.array([2000.0, 0.8, 30.0, 0.2])
CORRELATED = np.full((4, 4), 0.3) + 0.7 * np.eye(4)
CURVATURE = np.sqrt(DIAGONAL[:, None] * DIAGONAL) * CORRELATED
CENTRE = np.array([0.4, -0.4, 1.0, -0.2])
HESSIAN = CURVATURE - PULL * np.eye(4)
MEAN = np.linalg.solve(CURVATURE, HESSIAN @ CENTRE + PULL * PRIOR_MEAN)
# Of the gradients of minibatches.
NOISE = 0.05 * np.sqrt(DIAGONAL)
GOOD, BAD = 1 / DIAGONAL, np.array([3e-4, 3e-3, 1e-4, 2e-2])
BOTH = pytest.mark.parametrize("cls", [sg.SGHMC, sg.BAOA])


def one_step(cls, lr, noise, estimate):
    """The map of (θ, v), lr being lr G."""
    one, nothing = np.eye(4), np.zeros((4, 4))
    slope, pull = -lr[:, None] * CURVATURE, lr * (CURVATURE @ MEAN)
    blur = np.diag((lr * noise) ** 2)

    def move(a, b, q):
        """v <- b v + a θ + N(0, q), with the pull of a kick."""
        shift = pull if a is slope else 0 * pull
        zero = np.block([[nothing, nothing], [nothing, q]])
        return AffineMap(
            np.block([[one, nothing], [a, b * one]]),
            np.concatenate([0 * pull, shift]),
            zero,
        )

    def drift(part):
        a = np.block([[one, part * one], [nothing, one]])
        return AffineMap(a, np.zeros(8), np.zeros((8, 8)))

    if cls is sg.SGHMC:
        heat = np.diag(2 * (1 - MOMENTUM - estimate) * lr * HEAT)
        return move(slope, MOMENTUM, blur + heat).then(drift(1.0))
    injected = (1 - MOMENTUM**2) - (1 + MOMENTUM) ** 2 * estimate / 2
    thermostat = move(nothing, MOMENTUM, np.diag(injected * lr * HEAT))
    kick = move(slope, 1.0, blur)
    return kick.then(drift(0.5)).then(thermostat).then(drift(0.5))


class Chains:
    """Chains of a sampler whose state is of two tensors, [CHAINS, 2] each."""

    def __init__(self, cls, g, lr, noise, estimate=0.0):
        self.params = [
            nn.Parameter(torch.full((CHAINS, 2), START, dtype=torch.float64))
            for _ in range(2)
        ]
        given = torch.from_numpy(g).split(2)
        settings = {**TARGET, "prior_mean": PRIOR_MEAN, "noise_estimate": estimate}
        self.sampler = cls(
            self.params, lr, MOMENTUM, **settings, preconditioner=given, seed=7
        )
        self.noise = torch.from_numpy(noise)
        self.generator = torch.Generator().manual_seed(1)
        self.step_of_law = one_step(cls, lr * g, noise, estimate)
        self.law = (
            np.array([START] * 4 + [0.0] * 4),
            np.diag([*[0.0] * 4, *(lr * g * HEAT)]),
        )

    def step(self):
        theta = torch.cat([p.detach() for p in self.params], 1)
        blur = torch.randn(theta.shape, generator=self.generator, dtype=theta.dtype)
        loss_gradient = (theta - torch.from_numpy(CENTRE)) @ torch.from_numpy(HESSIAN)
        grads = (loss_gradient + self.noise * blur).split(2, 1)
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad.contiguous()
        self.sampler.step()
        self.law = self.step_of_law.push(*self.law)

    def check(self, label):
        momenta = [self.sampler.state[p]["momentum"] for p in self.params]
        places = torch.cat([*(p.detach() for p in self.params), *momenta], 1)
        mean, cov = self.law
        check_gaussian(places.numpy(), mean=mean, cov=cov, label=label)


def check_law(chains):
    for count in range(1, 31):
        chains.step()
        if count in (2, 7, 30):
            chains.check(f"step {count}")


@BOTH
@pytest.mark.parametrize("g", [GOOD, BAD], ids=["good", "bad"])
def test_the_chain_follows_its_law(cls, g):
    assert np.linalg.cond(CURVATURE) > 1e4
    check_law(Chains(cls, g, 0.3, NOISE, estimate=0.02))


@BOTH
def test_a_wrong_temperature_is_caught(cls):
    chains = Chains(cls, GOOD, 0.3, NOISE)
    chains.sampler.param_groups[0]["temperature"] *= 1.1
    with pytest.raises(StatisticalError):
        check_law(chains)


@pytest.mark.full
def test_a_good_one_reaches_the_target():
    """Within 60 steps, exactly by BAOA; a plain chain keeps 0.9 of its start."""
    chains = Chains(sg.BAOA, GOOD, 0.3, 0 * NOISE)
    for _ in range(60):
        chains.step()
    exact = HEAT * np.linalg.inv(CURVATURE)
    mean, cov = chains.law
    scale = np.sqrt(np.diag(exact))
    assert np.abs((mean[:4] - MEAN) / scale).max() < 0.02
    assert np.abs((cov[:4, :4] - exact) / scale / scale[:, None]).max() < 0.02
    chains.check("the target")
    plain = one_step(sg.BAOA, np.full(4, 3 / DIAGONAL.max()), 0 * NOISE, 0.0)
    assert plain.radius() ** 60 > 0.9
