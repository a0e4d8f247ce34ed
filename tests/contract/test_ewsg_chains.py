"""Many chains of EWSG in one tensor."""

import copy

import torch
from ewsg_chains import Draws
from short_chains import TARGET, advance, assert_same
from torch import nn

import torch_sgmcmc as sg


def batched(chains):
    g = torch.Generator().manual_seed(2)
    shapes = [(chains,), (chains, 3), (chains, 2, 130)]
    return [nn.Parameter(torch.randn(s, generator=g)) for s in shapes]


def test_one_chain_with_a_leading_dimension_is_one_chain():
    params, others = batched(1), batched(1)
    for ps, chains in ((params, 1), (others, None)):
        sampler = sg.EWSG(ps, **TARGET, num_chains=chains, seed=4)
        closure = Draws(ps)
        for _ in range(10):
            sampler.step(closure)
    assert_same(params, others)


def test_many_chains_resume_bit_for_bit():
    params = batched(20)
    sampler = sg.EWSG(params, **TARGET, num_chains=20, seed=4)
    advance(sampler, params, range(5))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    twin = sg.EWSG(others, lr=1.0, num_data=1, num_chains=20)
    twin.load_state_dict(copy.deepcopy(sampler.state_dict()))
    for s, ps in ((sampler, params), (twin, others)):
        advance(s, ps, range(5, 10))
    assert_same(params, others)
    assert twin.acceptance_rate == sampler.acceptance_rate > 0


def test_chains_in_several_groups():
    expected = batched(20)
    advance(sg.EWSG(expected, **TARGET, num_chains=20, seed=4), expected, range(9))
    params = batched(20)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    sampler = sg.EWSG(groups, **TARGET, num_chains=20, seed=4)
    advance(sampler, params, range(9))
    assert_same(params, expected)
