"""A saved and restored sampler continues its chain bit for bit."""

import copy
import pickle
from itertools import cycle, product

import pytest
import torch
from reference import same_bits
from short_chains import (
    KINDS,
    THREE,
    advance,
    assert_same,
    make,
    make_params,
    twin_of,
)
from stored_files import through_file
from torch import nn

import torch_sgmcmc as sg


def in_groups(params):
    return [{"params": params[:2]}, {"params": params[2:]}]


Saved = tuple[list[nn.Parameter], sg.Sampler]


def through_state_dict(params, sampler):
    state = copy.deepcopy(sampler.state_dict())
    new = [nn.Parameter(p.detach().clone()) for p in params]
    other = twin_of(sampler, in_groups(new))
    other.load_state_dict(state)
    return new, other


def through_torch_save(params, sampler):
    loaded = through_file({"params": params, "sampler": sampler.state_dict()})
    new = [nn.Parameter(p.detach()) for p in loaded["params"]]
    other = twin_of(sampler, in_groups(new))
    other.load_state_dict(loaded["sampler"])
    return new, other


def through_deepcopy(params, sampler):
    return copy.deepcopy((params, sampler))


def through_pickle(params, sampler):
    return pickle.loads(pickle.dumps((params, sampler)))


def in_many_dtypes():
    """Each parameter in a dtype of its own, as far as there are any."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    return [
        nn.Parameter(p.detach().to(dtype))
        for p, dtype in zip(make_params(), cycle(dtypes), strict=False)
    ]


# A file is the way that asks for most, and what it keeps is each sampler's own. The
# other ways are the base class's.
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, through_torch_save) for kind in KINDS),
        *product(THREE, (through_state_dict, through_deepcopy, through_pickle)),
    ],
)
def test_a_resumed_chain_continues_bit_for_bit(kind, way):
    first = 102 if kind == "SGHMC online" else 4  # the estimate in use
    params = in_many_dtypes()
    sampler = make(kind, in_groups(params))
    sampler.param_groups[1]["prior_precision"] = 0.5
    advance(sampler, params, range(first))
    resumed, other = way(params, sampler)
    assert type(other) is type(sampler)
    assert other.seed == sampler.seed
    for p, q in zip(params, resumed, strict=True):
        assert p is not q
        assert sampler.state[p].keys() == other.state[q].keys()
        for key, value in sampler.state[p].items():
            if torch.is_tensor(value):
                assert same_bits(value, other.state[q][key])
            else:
                assert value == other.state[q][key]
    advance(sampler, params, range(first, first + 4))
    advance(other, resumed, range(first, first + 4))
    assert_same(resumed, params)
    assert [int(g["step"]) for g in other.param_groups] == [first + 4] * 2


@pytest.mark.parametrize("kind", ["SGHMC", "EWSG", "HMC"])
def test_gamma_precision_resumes_bit_for_bit(kind):
    def half(params, sampler, gibbs):
        drawn = []
        for step in range(3):
            advance(sampler, params, range(step, step + 1))
            drawn.append(gibbs.step())
        return drawn

    params = make_params()
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    sampler = make(kind, groups)
    gibbs = sg.GammaPrecision(sampler, shape=2.0, rate=0.5)
    half(params, sampler, gibbs)
    saved = [params, sampler.state_dict(), gibbs.state_dict()]
    values, sampler_state, gibbs_state = through_file(saved)
    expected = half(params, sampler, gibbs)

    resumed = [nn.Parameter(v.detach()) for v in values]
    other = make(kind, [{"params": resumed[:3]}, {"params": resumed[3:]}], seed=0)
    other_gibbs = sg.GammaPrecision(other)
    other.load_state_dict(sampler_state)
    other_gibbs.load_state_dict(gibbs_state)
    assert half(resumed, other, other_gibbs) == expected
    assert_same(resumed, params)
    assert [g["prior_precision"] for g in other.param_groups] == expected[-1]
    # Every draw differs from every other one.
    assert len({x for pair in expected for x in pair}) == 6
