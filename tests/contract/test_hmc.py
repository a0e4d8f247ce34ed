"""HMC as a class: its decisions, many chains, and masses.

Its law is the subject of ``test_hmc_law.py``, its operators of
``test_hmc_operators.py``.
"""

import math

import pytest
import torch
from hmc_chains import GOOD, Quartic
from reference import same_bits
from short_chains import assert_same, kept_state, two
from torch import nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C
from torch_sgmcmc._impl import ops as ops

# ---- Decisions -------------------------------------------------------------------


def by_hand(params, closure, momenta, masses, priors, chains, temperature):
    """One trajectory of the settings of ``test_every_decision``, by the operators.

    Moves the parameters to its end and returns the log ratios of the decision.
    """
    move = {"num_data": 10.0}

    def gradients():
        for p in params:
            p.grad = None
        return closure().detach()

    def leapfrog(kick, drift):
        for i, p in enumerate(params):
            with torch.no_grad():
                ops.hmc_leapfrog_(
                    *([p], [p.grad], [momenta[i]], [masses[i]], []),
                    **{"kick": kick, "drift": drift, "prior_precision": priors[i]},
                    **move,
                )

    def energy(loss):
        total = 10.0 * loss
        for p, r, m, prior in zip(params, momenta, masses, priors, strict=True):
            q = p.detach().double().flatten(1)
            kinetic = (r.double().square() / m.double()).flatten(1).sum(1)
            total = total + 0.5 * (prior * q.square().sum(1) + kinetic)
        return total

    start = energy(gradients())
    for i in range(3):
        leapfrog(0.15 if i else 0.075, 0.15)
        loss = gradients()
    leapfrog(0.075, 0.0)
    assert start.shape == (chains,)
    return (start - energy(loss)) / temperature


@pytest.mark.parametrize("every", [0, 1, 4])
def test_every_decision(every):
    """Against the trajectory made by hand: two groups, masses, both momenta's fates."""
    chains, temperature = 6, 0.8
    g = torch.Generator().manual_seed(1)
    params = [
        nn.Parameter(torch.randn(chains, 4, generator=g)),
        nn.Parameter(torch.randn(chains, 2, 3, generator=g, dtype=torch.float64)),
    ]
    priors = [2.0, 0.5]
    masses = [(0.5 + torch.rand(p.shape, generator=g)).to(p.dtype) for p in params]
    sampler = sg.HMC(
        [
            {"params": [p], "prior_precision": prior}
            for p, prior in zip(params, priors, strict=True)
        ],
        step_size=0.15,
        num_steps=3,
        num_data=10.0,
        temperature=temperature,
        resample_momentum_every=every,
        num_chains=chains,
        seed=-5,
    )
    sampler.set_mass(masses)
    offsets = [o for group in sampler.param_groups for o in group["offsets"]]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    momenta = []
    accepted, seen = 0, set()
    for step in range(40):
        if not momenta or (every and step % every == 0):
            momenta = [torch.empty_like(m) for m in masses]
            ops.hmc_momenta_(
                momenta,
                masses,
                temperature=temperature,
                offsets=offsets,
                seed=-5,
                step=step,
            )
        start = [t.detach().clone() for t in twins]
        turned = [-r for r in momenta]
        ratios = by_hand(
            twins, Quartic(twins, True), momenta, masses, priors, chains, temperature
        )
        yes = ops.metropolis_decide(
            ratios, proposal=0, purpose=_C.Purpose.METROPOLIS, seed=-5, step=step
        )
        with torch.no_grad():
            for t, old, r, back in zip(twins, start, momenta, turned, strict=True):
                rows = yes.view(-1, *[1] * (t.dim() - 1))
                t.copy_(torch.where(rows, t, old))
                r.copy_(torch.where(rows, r, back))
        sampler.step(Quartic(params, True))
        seen |= set(yes.tolist())
        accepted += int(yes.sum())
        assert_same(params, twins)
        for p, r in zip(params, momenta, strict=True):
            if every == 1:
                assert "momentum" not in sampler.state[p]
            else:
                assert same_bits(sampler.state[p]["momentum"], r)
    assert seen == {True, False}
    assert sampler.acceptance_rate == accepted / (40 * chains)
    assert sampler.num_divergences == 0


def test_a_rejected_trajectory_leaves_every_bit():
    special = torch.tensor([0.0, -0.0, 1e-45, 1.0, -2.5])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        p = nn.Parameter(special.to(dtype))
        before = p.detach().clone()
        sampler = sg.HMC([p], 1.0, num_steps=2, num_data=1, seed=0)
        losses = iter([0.0, 0.0, 1e9] * 5)

        def closure(p=p, losses=losses):
            p.grad = torch.ones_like(p)
            return next(losses)

        for _ in range(5):
            sampler.step(closure)
            assert same_bits(p, before)
        assert sampler.acceptance_rate == 0.0
        assert sampler.num_divergences == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_divergences_are_rejected_and_counted(value):
    p = nn.Parameter(torch.ones(3, 2))
    before = p.detach().clone()
    sampler = sg.HMC([p], 0.1, num_steps=1, num_data=1, num_chains=3, seed=0)
    assert math.isnan(sampler.acceptance_rate)
    ends = iter([[0.0] * 3, [0.0, value, value]] * 2)

    def closure():
        p.grad = torch.zeros_like(p)
        return torch.tensor(next(ends))

    sampler.step(closure)
    assert sampler.num_divergences == 2
    assert sampler.acceptance_rate == 1 / 3
    assert same_bits(p[1:], before[1:])
    assert not torch.equal(p[0], before[0])
    sampler.step(closure)
    assert sampler.num_divergences == 4


def test_a_trajectory_that_runs_away():
    p = nn.Parameter(torch.full((5,), 2.0))
    before = p.detach().clone()
    sampler = sg.HMC([p], 50.0, num_steps=30, num_data=1, seed=0)
    sampler.step(Quartic([p]))
    assert same_bits(p, before)
    assert sampler.num_divergences == 1
    assert sampler.acceptance_rate == 0.0


def test_chains_do_not_depend_on_each_other():
    g = torch.Generator().manual_seed(1)
    start = torch.randn(7, 5, generator=g)
    many, one = nn.Parameter(start.clone()), nn.Parameter(start[:1].clone())
    for p in (many, one):
        sampler = sg.HMC([p], 0.3, num_steps=3, num_data=3, num_chains=len(p), seed=2)
        for _ in range(20):
            sampler.step(Quartic([p], chains=True))
        assert 0 < sampler.acceptance_rate < 1
    # The first chain has the same noise in both.
    assert same_bits(many[0], one[0])


def test_momenta_that_a_schedule_no_longer_keeps():
    params = two()
    sampler = sg.HMC(params, **GOOD, resample_momentum_every=0)
    sampler.step(Quartic(params))
    assert {*sampler.state} == {*params}
    sampler.param_groups[0]["resample_momentum_every"] = 1
    sampler.step(Quartic(params))
    assert kept_state(sampler) == {}


# ---- Mass ------------------------------------------------------------------------


def test_masses():
    params = two()
    sampler = sg.HMC(params, **GOOD, resample_momentum_every=0)
    sampler.step(Quartic(params))
    sampler.set_mass([2.0, torch.tensor([0.5, 3.0])])
    assert sampler.state[params[0]]["mass"].tolist() == [2.0] * 7
    assert sampler.state[params[1]]["mass"].tolist() == [[0.5, 3.0]] * 3
    assert [sampler.state[p]["mass"].dtype for p in params] == [p.dtype for p in params]
    assert not any("momentum" in sampler.state[p] for p in params)
    sampler.step(Quartic(params))
    # Masses of one have no effect, and none at all have the same.
    chains = []
    for masses in (None, [1, 1.0]):
        others = two()
        other = sg.HMC(others, **GOOD)
        other.set_mass([3.0, 3.0])
        other.set_mass(masses)
        other.step(Quartic(others))
        chains.append(others)
    assert_same(*chains)
    # Half precision has masses in float32, and a group added later those of one.
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    sampler = sg.HMC([half], **GOOD)
    sampler.set_mass([1.001])
    assert sampler.state[half]["mass"].dtype == torch.float32
    late = nn.Parameter(torch.ones(3))
    sampler.add_param_group({"params": [late]})
    sampler.step(Quartic([half, late]))
    sampler.set_mass(None)
    assert kept_state(sampler).keys() == {half}
    assert kept_state(sampler)[half].keys() == {"master"}
