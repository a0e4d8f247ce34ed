"""The law of HMC, SBPS and HMC-ECS after their target or their steps have changed.

Variances over the exact ones, with fixed seeds. A target that is not followed is wrong
by a factor of 3.
"""

import math

import numpy as np
import pytest
import torch

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

CURVATURE = 1.0
NUM_DATA = 100.0
F64 = torch.float64


@pytest.mark.parametrize(
    "changes",
    [
        *({"step_size": 0.05}, {"temperature": 0.25}, {"num_data": 4 * NUM_DATA}),
        *({"prior_precision": 2 * NUM_DATA}, {"num_steps": 5}),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_hmc_after_a_change(changes):
    """Its next trajectories are of the new settings, and its test is exact."""
    chains = 5000
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(chains, 1, dtype=torch.float64, generator=generator)
    p = (start / math.sqrt(NUM_DATA * CURVATURE)).requires_grad_()
    sampler = sg.HMC(
        [p],
        0.02,
        num_steps=3,  # no half period, after which nothing would have mixed
        num_data=NUM_DATA,
        num_chains=chains,
        seed=3,
    )

    def closure():
        losses = CURVATURE * p.square().sum(1) / 2
        losses.sum().backward()
        return losses

    ratios = []
    for k in range(60):
        if k == 20:
            sampler.param_groups[0].update(changes)
        sampler.step(closure)
        if k >= 40:
            ratios.append(float(p.detach().var()))
    group = sampler.param_groups[0]
    curvature = group["num_data"] * CURVATURE + group["prior_precision"]
    assert np.mean(ratios) == pytest.approx(group["temperature"] / curvature, rel=0.05)


TARGETS = [{"temperature": 4.0}, {"num_data": 160}, {"prior_precision": 120.0}]


def ratio_of(draws, sampler):
    """Returns the variance of the draws over that of the sampler's target."""
    group = sampler.param_groups[0]
    precision = group["num_data"] + group["prior_precision"]
    variance = float(torch.stack(draws).var(0).mean())
    return variance * precision / group["temperature"]


@pytest.mark.parametrize("changes", TARGETS, ids=lambda c: next(iter(c)))
def test_sbps_after_a_change(changes):
    """The new target is observed afresh."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, dtype=F64, generator=generator)
    theta = torch.zeros(4, dtype=F64, requires_grad=True)
    settings = {"sample_interval": 0.05, "refresh_rate": 1.0, "seed": 1}
    sampler = sg.SBPS([theta], num_data=40, **settings)
    draws = []
    sampler.register_sample_hook(lambda *_: draws.append(theta.detach().clone()))

    def closure():
        rows = torch.randint(40, (20,), generator=generator)
        return (theta - x[rows]).square().sum(1) / 2

    for k in range(12_000):
        if k == 500:
            sampler.param_groups[0].update(changes)
        if k == 1000:
            draws.clear()
        sampler.step(closure)
    assert ratio_of(draws, sampler) == pytest.approx(1.0, abs=0.15)


@pytest.mark.filterwarnings("ignore:num_blocks")
@pytest.mark.parametrize("changes", TARGETS, ids=lambda c: next(iter(c)))
def test_hmcecs_after_a_change(changes):
    """Expansions and subsample follow the number of data."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 3, dtype=F64, generator=generator)
    theta = x.mean(0).clone().requires_grad_()

    def closure(rows):
        return -(theta - x[rows]).square().sum(1) / 2

    sizes = {"num_data": 200, "subsample_size": 20, "num_blocks": 10}
    sampler = sg.HMCECS([theta], **sizes, step_size=0.3, trajectory_length=1.2, seed=1)
    sampler.step(closure)
    sampler.param_groups[0].update(changes)
    draws = []
    for k in range(1500):
        sampler.step(closure)
        if k > 100:
            draws.append(theta.detach().clone())
    assert ratio_of(draws, sampler) == pytest.approx(1.0, abs=0.15)
