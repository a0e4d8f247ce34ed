"""Seeds made of seeds, and the warning about samplers that share one."""

import copy
import gc
import random
import warnings
import weakref

import pytest
import torch
from torch import nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C
from torch_sgmcmc.core import distributed

SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 5)


@pytest.mark.parametrize(
    ("seed", "stream", "folded"),
    [
        (0, 0, -751597713854386695),
        (0, 1, 8684763733977457676),
        (7, 3, 3823108546702731677),
        (-1, 0, -7754111745894394787),
        (-(2**63), 2**63 - 1, -4926981086998153266),
    ],
)
def test_known_answers(seed, stream, folded):
    # tests/cpp/optim_test.cpp has the same.
    assert sg.fold_in(seed, stream) == folded


def test_it_is_the_first_half_of_a_philox_block():
    # Of a purpose of its own: it is no sampler's noise.
    rng = random.Random(0)
    for _ in range(200):
        seed, stream = rng.getrandbits(64), rng.getrandbits(63)
        counter = [stream & 0xFFFFFFFF, stream >> 32, 0, _C.Purpose.SEED << 16]
        low, high, *_ = _C.philox4x32(counter, [seed & 0xFFFFFFFF, seed >> 32])
        signed = seed - 2**64 if seed >= 2**63 else seed
        folded = sg.fold_in(signed, stream)
        assert folded % 2**64 == high << 32 | low
        assert -(2**63) <= folded < 2**63


def test_samplers_with_folded_seeds_share_no_noise():
    def noise(seed):
        p = nn.Parameter(torch.zeros(1000, dtype=torch.float64))
        p.grad = torch.zeros_like(p)
        sg.SGLD([p], lr=0.5, num_data=1, seed=seed).step()
        return p.detach()

    own, first, second = (noise(s) for s in (3, sg.fold_in(3, 0), sg.fold_in(3, 1)))
    # Correlations of 1000 pairs have deviation 0.032; six of them: 2e-9 each.
    for a, b in ((own, first), (own, second), (first, second)):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.19
    assert torch.equal(own, noise(3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, 0), TypeError, r"Invalid seed: None \(must be an int, got NoneType\)"),
        ((0.5, 0), TypeError, r"Invalid seed: 0\.5"),
        ((2**63, 0), ValueError, r"Invalid seed: 9223372036854775808 \(must fit in 64"),
        ((-(2**63) - 1, 0), ValueError, "Invalid seed: -9223372036854775809"),
        ((0, -1), ValueError, r"Invalid stream: -1 \(must be >= 0\)"),
        ((0, 2**63), ValueError, r"Invalid stream: 9223372036854775808 \(must fit in"),
        ((0, True), TypeError, "Invalid stream: True"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        sg.fold_in(*arguments)


def sampler(seed, kind=sg.SGLD):
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    return kind([p], lr=0.1, num_data=10, seed=seed)


def test_alternate_steps_with_one_seed_warn_once():
    a, b = sampler(41), sampler(41, sg.SGHMC)
    a.step()
    b.step()
    with pytest.warns(sg.SharedNoiseWarning) as record:
        a.step()
    assert [str(warning.message) for warning in record] == [
        "Two samplers with seed 41 step alternately (SGLD and SGHMC): they draw the "
        "same noise. Give each a different seed, with torch_sgmcmc.fold_in"
    ]
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            b.step()
            a.step()


@pytest.mark.usefixtures("no_warnings")
def test_seeds_of_their_own_do_not_warn():
    a, b = sampler(sg.fold_in(42, 0)), sampler(sg.fold_in(42, 1))
    for _ in range(3):
        a.step()
        b.step()


@pytest.mark.usefixtures("no_warnings")
def test_a_sampler_that_replaces_another_does_not_warn():
    kept = []  # the first is still alive, as in a notebook
    for _ in range(3):
        kept.append(sampler(43))
        kept[-1].step()
        kept[-1].step()


@pytest.mark.usefixtures("no_warnings")
def test_a_sampler_that_is_gone_does_not_warn():
    a, b = sampler(44), sampler(44)
    a.step()
    b.step()
    del b
    gc.collect()
    a.step()


@pytest.mark.usefixtures("no_warnings")
def test_another_seed_ends_it():
    a, b = sampler(45), sampler(45)
    a.step()
    b.step()
    b.load_state_dict(copy.deepcopy(sampler(46).state_dict()))
    b.step()
    c = sampler(46)
    c.step()


def test_nothing_is_kept_of_samplers(monkeypatch):
    gone = [weakref.ref(p) for p in kept_by(range(1000, 1010))]
    gc.collect()
    assert not any(p() for p in gone)
    monkeypatch.setattr(distributed, "_limit", 0)
    sampler(1010).step()
    assert not {*range(1000, 1010)} & {*distributed._last}


def kept_by(seeds):
    """Parameters of samplers that have made a step."""
    samplers = [sampler(seed) for seed in seeds]
    for each in samplers:
        each.step()
    return [each.param_groups[0]["params"][0] for each in samplers]


def steps_of(p, seed, steps=2, **options):
    made = sg.SGHMC([p], lr=0.1, num_data=10, seed=seed, **options)
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        made.step()


def test_a_new_sampler_with_the_same_seed_warns():
    p = nn.Parameter(torch.zeros(3))
    steps_of(p, 51)
    with pytest.warns(sg.SharedNoiseWarning) as record:
        steps_of(p, 51)
    assert [str(warning.message) for warning in record] == [
        "A new SGHMC starts with seed 51, with which another sampler has made steps on "
        "these parameters: it draws the same noise again. Continue that sampler (or "
        "load its state dict), or give each a different seed, with torch_sgmcmc.fold_in"
    ]
    assert record[0].filename == __file__
    with pytest.warns(sg.SharedNoiseWarning):  # and so is the next
        steps_of(p, 51)


@pytest.mark.usefixtures("no_warnings")
def test_a_repeated_or_resumed_run_does_not_warn():
    p = nn.Parameter(torch.zeros(3))
    steps_of(p, 53)
    with torch.no_grad():
        p.zero_()
    steps_of(p, 53)  # from the same start: the same chain again
    steps_of(p, 54)
    steps_of(nn.Parameter(torch.ones(3)), 54)  # another model
    first = sg.SGHMC([p], lr=0.1, num_data=10, seed=55)
    p.grad = torch.ones_like(p)
    first.step()
    saved = first.state_dict()
    del first
    other = sg.SGHMC([p], lr=0.1, num_data=10)
    other.load_state_dict(saved)
    other.step()
