"""What gauges have found is found again where their state is loaded."""

import copy
from typing import Any

import pytest
import torch

import torch_sgmcmc as sg


@pytest.mark.parametrize(("estimate", "noise"), [(0.0, 1.0), ("online", 0.1)])
def test_what_was_found_is_found_after_loading(estimate: Any, noise: float) -> None:
    p = torch.zeros(500, requires_grad=True)
    sampler = sg.SGHMC([p], 0.02, 0.5, num_data=50, noise_estimate=estimate, seed=0)
    gauges = sg.Gauges(sampler, every=1)
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        p.grad = p.detach() + noise * torch.randn(500, generator=g)
        sampler.step()
    assert estimate == "online" or "is hot" in gauges.summary()
    twin = copy.deepcopy(sampler)
    again = sg.Gauges(twin, every=1)
    again.load_state_dict(copy.deepcopy(gauges.state_dict()))
    assert again.summary() == gauges.summary()
    assert again.state_dict()["series"] == gauges.state_dict()["series"]
