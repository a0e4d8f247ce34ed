"""Checkpoints of format 1, one for each sampler, which later versions load or refuse.

``python tests/contract/test_golden_checkpoints.py`` writes them. Only a new format
(``FORMAT`` in ``core/random_state.py``) is a reason to.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_sgmcmc as sg

FOLDER = Path(__file__).parents[1] / "golden"

COMMON = {"num_data": 10, "prior_precision": 0.5, "seed": 4}
SAMPLERS = {
    "sgld": (sg.SGLD, {"lr": 0.1}),
    "sglrw": (sg.SGLRW, {"lr": 0.1}),
    "sghmc": (sg.SGHMC, {"lr": 0.1, "noise_estimate": 0.05}),
    "sghmc_online": (sg.SGHMC, {"lr": 0.01, "noise_estimate": "online"}),
    "baoa": (sg.BAOA, {"lr": 0.1}),
    "mclmc": (sg.MCLMC, {"lr": 0.1}),
    "sgnht": (sg.SGNHT, {"lr": 0.1}),
    "psgld": (sg.PSGLD, {"lr": 0.1, "eps": 0.1, "gamma": False}),
    "ewsg": (sg.EWSG, {"lr": 0.1}),
    "hmc": (sg.HMC, {"step_size": 0.1, "num_steps": 2, "resample_momentum_every": 3}),
    "sbps": (sg.SBPS, {"preconditioned": True}),
    "hmc_ecs": (sg.HMCECS, {"subsample_size": 4, "num_blocks": 4, "step_size": 0.1}),
}


def begin(name):
    cls, settings = SAMPLERS[name]
    shapes, dtype = [(5,), (3, 2)], torch.float64
    params = [nn.Parameter(torch.full(s, 0.5, dtype=dtype)) for s in shapes]
    if name not in ("hmc_ecs", "sbps"):
        params[0] = nn.Parameter(params[0].detach().bfloat16())
    return cls(params, **COMMON, **settings), params


def advance(sampler, params, steps):
    """Steps on a quartic, by operations that every processor rounds alike."""

    def gradients():
        sampler.zero_grad()
        scale = 1.0
        if isinstance(sampler, sg.EWSG):
            scale += 0.125 * float(sampler.minibatches[0] % 3)
        for p in params:
            p.grad = (p * p * p).detach() * scale
        return sum((p.detach().double() ** 4).sum() / 4 for p in params)

    def losses(index=None):
        x = torch.linspace(-1, 1, 10, dtype=torch.float64)
        x = x if index is None else x[index]
        return -((sum(p.sum() for p in params) * x - x) ** 2)

    closures = {sg.SBPS: lambda: -losses(), sg.HMCECS: losses}
    closure = closures.get(type(sampler), gradients)
    for _ in range(steps):
        sampler.step(closure)


def write():
    for name in SAMPLERS:
        sampler, params = begin(name)
        advance(sampler, params, 5)
        saved = {"params": [p.detach().clone() for p in params]}
        saved["sampler"] = copy.deepcopy(sampler.state_dict())
        advance(sampler, params, 5)
        saved["later"] = [p.detach().clone() for p in params]
        torch.save(saved, FOLDER / f"{name}.pt")


def load(name):
    saved = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    sampler, params = begin(name)
    for p, value in zip(params, saved["params"], strict=True):
        p.data.copy_(value)
    return sampler, params, saved


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_saved_chain_resumes(name):
    sampler, params, saved = load(name)
    sampler.load_state_dict(saved["sampler"])
    assert sampler.param_groups[0]["step"] == 5
    advance(sampler, params, 5)
    for p, value in zip(params, saved["later"], strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-9, atol=1e-12)
        assert not torch.equal(p, torch.full_like(p, 0.5))


@pytest.mark.parametrize("name", SAMPLERS)
def test_another_format_is_refused_by_its_number(name):
    sampler, _, saved = load(name)
    for group in saved["sampler"]["param_groups"]:
        group["format"] += 1
    with pytest.raises(ValueError, match="Invalid state_dict: its format is 2"):
        sampler.load_state_dict(saved["sampler"])


if __name__ == "__main__":
    write()
