"""The law of HMC after its target or its steps have changed."""

import math

import numpy as np
import pytest
import torch

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

CURVATURE = 1.0
NUM_DATA = 100.0


@pytest.mark.parametrize(
    "changes",
    [
        {"step_size": 0.05},
        {"temperature": 0.25},
        {"num_data": 4 * NUM_DATA},
        {"prior_precision": 2 * NUM_DATA},
        {"num_steps": 5},
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
