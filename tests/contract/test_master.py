"""Parameters in bf16 and fp16: a chain in fp32, of which they are the rounded values.

A comparison bit for bit shows that rounding is no part of the chain, whose law is that
of fp32 (``test_sampling_law.py``).
"""

import copy
from itertools import count

import pytest
import short_chains as chains
import torch
from reference import same_bits
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core import ops as ops

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
