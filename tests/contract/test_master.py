"""Parameters in bf16 and fp16: a chain in fp32, of which they are the rounded values.

What is compared bit for bit here shows that rounding is no part of the chain; the law
of the chain itself is that of fp32 (``test_sampling_law.py``). The law is tested here
as well, where rounding after every update would spoil it.
"""

import copy
from itertools import count
from unittest import mock

import numpy as np
import pytest
import short_chains as chains
import torch
from reference import same_bits
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core import ops as ops

LOW = (torch.bfloat16, torch.float16)
# What is rounded is each sampler's own; to which type it is, their base class's.
BFLOAT16 = torch.bfloat16
EACH_LOW = [*((kind, BFLOAT16) for kind in chains.ANY_DRAWS), ("SGHMC", torch.float16)]


def take_step(sampler, params, step, dtype):
    """One step on ‖θ‖²/2 with noise: loss and gradients at θ, and themselves, rounded.

    To ``dtype``, whatever type the parameters are in.
    """
    draws = count()

    def closure():
        g = torch.Generator().manual_seed(1000 * step + next(draws))
        losses = []
        for p in params:
            x = p.to(dtype)
            noise = 0.02 * torch.randn(p.shape, generator=g)
            p.grad = (x.float() + noise).to(dtype).to(p.dtype)
            losses.append(x.detach().double().square().sum() / 2)
        return torch.stack(losses).sum()

    sampler.step(closure)


def masters(sampler, params):
    return [sampler.state[p]["master"] for p in params]


@pytest.mark.parametrize(("kind", "dtype"), EACH_LOW)
def test_rounding_is_no_part_of_the_chain(kind, dtype):
    """It is the chain of a parameter in fp32, with the gradients at its rounded value.

    Bit for bit. Where a decision is made, without a prior, whose part in it is that of
    the rounded value.
    """
    low = chains.make_params(dtype)
    full = [nn.Parameter(p.detach().float()) for p in low]
    cls, options = chains.KINDS[kind]
    decides = cls is sg.EWSG or (cls is sg.HMC and "metropolis" not in options)
    prior = {"prior_precision": 0.0} if decides else {}
    sampler, other = chains.make(kind, low, **prior), chains.make(kind, full, **prior)
    steps = 103 if kind == "SGHMC online" else 6
    for step in range(steps):
        take_step(sampler, low, step, dtype)
        take_step(other, full, step, dtype)
        chains.assert_same(masters(sampler, low), full)
        chains.assert_same(low, [q.detach().to(dtype) for q in full])
    for p, q in zip(low, full, strict=True):
        ours, theirs = dict(sampler.state[p]), other.state.get(q, {})
        del ours["master"]
        assert ours.keys() == theirs.keys()
        assert all(
            same_bits(v, theirs[k]) for k, v in ours.items() if torch.is_tensor(v)
        )
    # It was not by chance: some did not move by a unit in the last place.
    assert not all(
        same_bits(m, p.detach().float())
        for m, p in zip(masters(sampler, low), low, strict=True)
    )


# 4 units in the last place above the mean of 1, and 8 below it. For bf16, 0.03.
SD = {dtype: 3.84 * torch.finfo(dtype).eps for dtype in LOW}
LR_H = 1e-3  # lr times the curvature: moves of 0.04 sd and less
COUNT = 16_384
LAWS = {
    "SGLD": (sg.SGLD, {}, 500),
    "SGHMC": (sg.SGHMC, {"momentum": 0.9}, 300),
    "SGNHT": (sg.SGNHT, {"momentum": 0.9}, 300),
    "EWSG": (sg.EWSG, {"momentum": 0.9, "index_chain_length": 0}, 300),
    "EWSG overdamped": (sg.EWSG, {"momentum": 0.0, "index_chain_length": 0}, 500),
    "PSGLD frozen": (sg.PSGLD, {"adapt": False, "eps": 1e-30}, 500),
    "HMC": (sg.HMC, {"num_steps": 75, "num_chains": COUNT}, 8),
}


def variance_of_the_chain(momentum):
    """Variance of θ, in units of the target's, in the stationary law of the chain.

    θ' = θ + v', v' = m v - lr h θ + noise of variance 2 (1 - m) lr h.
    """
    a = np.array([[1 - LR_H, momentum], [-LR_H, momentum]])
    q = 2 * (1 - momentum) * LR_H * np.ones((2, 2))
    return float(np.linalg.solve(np.eye(4) - np.kron(a, a), q.ravel())[0])


LEAPFROG = ops.hmc_leapfrog_


def rounded_leapfrog(*lists, **move):
    """The mutant of HMC: rounded after every leapfrog step."""
    LEAPFROG(*lists, **move)
    for p, master in zip(lists[0], lists[-1], strict=True):
        master.copy_(p)


def law_of(kind, dtype, *, forget):
    """Mean and variance after some steps from the law of the chain, as z-scores.

    And how many coordinates never moved.

    Args:
        kind: of LAWS.
        dtype: of the parameter.
        forget: the mutant, a chain that is rounded after every update.
    """
    cls, options, steps = LAWS[kind]
    sd = SD[dtype]
    exact = 1.0
    if cls is not sg.HMC:
        exact = variance_of_the_chain(options.get("momentum", 0.0))
    start = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    p = nn.Parameter((1 + sd * exact**0.5 * start).to(dtype))
    if cls is sg.HMC:
        options = {**options, "step_size": 0.02 * sd}
    else:
        options = {**options, "lr": LR_H * sd**2}
    sampler = cls([p], num_data=1.0, seed=2, **options)
    if cls is sg.PSGLD:  # G = 1
        sampler.state[p]["square_average"] = torch.ones(COUNT)
    begin, moved = p.detach().clone(), torch.zeros(COUNT, dtype=torch.bool)

    def closure():
        x = p.detach().float() - 1
        p.grad = (x / sd**2).to(dtype)
        return (x.double() / sd).square() / 2

    leapfrog = rounded_leapfrog if forget else LEAPFROG
    for _ in range(steps):
        with mock.patch("torch_sgmcmc.core.ops.hmc_leapfrog_", leapfrog):
            sampler.step(closure)
        moved |= p.detach() != begin
        if forget:
            sampler.state[p]["master"].copy_(p.detach())
    assert same_bits(p.detach(), sampler.state[p]["master"].to(dtype))
    z = ((sampler.state[p]["master"].double() - 1) / (sd * exact**0.5)).numpy()
    unmoved = COUNT - float(moved.sum())
    return [z.mean() * COUNT**0.5, (z.var() - 1) * (COUNT / 2) ** 0.5, unmoved]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in LAWS), ("SGLD", torch.float16)],
)
def test_the_law_of_small_moves(kind, dtype):
    """16,384 coordinates that started in the law of the chain are still in it.

    Mean and variance are allowed 5 standard deviations of their estimates, 5.5 % of the
    variance: a false alarm in 10^6. All coordinates move. Rounded after every update,
    the variance is 19 deviations off, but for HMC, of which most never move.
    """
    assert max(map(abs, law_of(kind, dtype, forget=False))) < 5
    if dtype is torch.bfloat16:  # the other's chains are the same, in other units
        assert max(map(abs, law_of(kind, dtype, forget=True))) > 9


@pytest.mark.parametrize("kind", chains.THREE)
def test_only_low_precision_has_a_master(kind):
    params = [
        *chains.make_params(torch.float32)[:2],
        *chains.make_params(torch.float64)[:2],
    ]
    low = chains.make_params(torch.bfloat16)[:1]
    sampler = chains.make(kind, [*params[:2], *low, *params[2:]])
    chains.advance(sampler, [*params, *low], range(2))
    assert not any("master" in sampler.state.get(p, {}) for p in params)
    (master,) = masters(sampler, low)
    assert master.dtype is torch.float32
    assert not same_bits(master, low[0].detach().float())


@pytest.mark.parametrize("kind", chains.THREE)
def test_the_chain_continues_from_a_changed_parameter(kind):
    """Element by element; an lr that moves nothing shows where each is taken from."""
    (p,) = params = chains.make_params(torch.bfloat16)[-1:]
    sampler = chains.make(kind, params)
    for step in range(4):
        take_step(sampler, params, step, torch.bfloat16)
    with torch.no_grad():
        p.clamp_(min=-0.5)
        p[:10] = 0.25
        p[10:20] *= -1
    before, seen = sampler.state[p]["master"].clone(), p.detach().clone()
    kept = before.bfloat16() == seen
    assert 100 < kept.sum() < 990
    if isinstance(sampler, sg.HMC):
        for group in sampler.param_groups:
            group["step_size"] = 1e-30
            if group["trajectory_length"] is not None:
                group["trajectory_length"] = 1e-30
    else:
        for group in sampler.param_groups:
            group["lr"] = 1e-30
        if "momentum" in sampler.state[p]:
            sampler.state[p]["momentum"].zero_()
    take_step(sampler, params, 4, torch.bfloat16)
    master = sampler.state[p]["master"]
    assert torch.equal(master, torch.where(kept, before, seen.float()))
    assert same_bits(p, seen)


@pytest.mark.parametrize("kind", chains.THREE)
def test_a_state_dict_without_masters(kind):
    """Files without masters load: the chain starts from the parameter."""
    dtype = torch.bfloat16
    params = chains.make_params(dtype)
    sampler = chains.make(kind, params)
    for step in range(3):
        take_step(sampler, params, step, dtype)
    saved = copy.deepcopy(sampler.state_dict())
    for i, p in enumerate(params):
        del saved["state"][i]["master"]
        sampler.state[p]["master"] = p.detach().float()
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = chains.make(kind, others, seed=99)
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        take_step(sampler, params, step, dtype)
        take_step(resumed, others, step, dtype)
    chains.assert_same(masters(resumed, others), masters(sampler, params))


def test_a_parameter_that_changes_its_type():
    """Leftover masters do not matter: fp32 has none, bf16 starts from the parameter."""
    net = nn.Linear(40, 3)
    sampler = sg.SGLD(net.parameters(), 1e-6, num_data=10, seed=1)

    def step():
        net(torch.ones(1, 40, dtype=net.weight.dtype)).sum().backward()
        sampler.step()
        sampler.zero_grad()

    net.bfloat16()
    step()
    net.float()
    before = net.weight.detach().clone()
    step()
    assert not torch.equal(net.weight, before)
    with torch.no_grad():
        net.weight += 1
    net.bfloat16()
    step()
    master = sampler.state[net.weight]["master"]
    assert same_bits(net.weight.detach(), master.bfloat16())
    assert bool((master > 0.5).all())
