"""HMC as a class: its decisions, many chains, masses, and errors."""

import math
import warnings
from functools import partial

import pytest
import torch
from failed_steps import refused, step_fails
from hmc_chains import GOOD, Quartic
from reference import same_bits
from short_chains import assert_same, kept_state, two
from torch import nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops as ops


def by_hand(params, closure, momenta, masses, priors, chains, temperature):
    """The log ratios of a trajectory of ``test_every_decision``, by the operators."""

    def gradients():
        for p in params:
            p.grad = None
        return closure().detach()

    def leapfrog(kick, drift):
        move = {"kick": kick, "drift": drift, "num_data": 10.0}
        for p, r, m, prior in zip(params, momenta, masses, priors, strict=True):
            with torch.no_grad():
                lists = ([p], [p.grad], [r], [m], [])
                ops.hmc_leapfrog_(*lists, **move, prior_precision=prior)

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


@pytest.mark.parametrize("last", [None, torch.ones(2)])
def test_a_wrong_loss_at_the_end_restores_the_parameters(last):
    params, calls = [torch.ones(3, requires_grad=True)], iter([True, True, False])
    sampler = sg.HMC(params, 0.1, num_steps=2, num_data=1, seed=0)
    data, before = Quartic(params), [p.detach().clone() for p in params]

    def closure():
        loss = data()
        return loss if next(calls) else last

    with pytest.raises((TypeError, ValueError), match="loss"):
        sampler.step(closure)
    assert all(map(torch.equal, before, params))
    assert int(sampler.param_groups[0]["step"]) == 0


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
    each = zip(params, priors, strict=True)
    groups = [{"params": [p], "prior_precision": prior} for p, prior in each]
    options = {"resample_momentum_every": every, "num_chains": chains, "seed": -5}
    target = {"num_data": 10.0, "temperature": temperature}
    sampler = sg.HMC(groups, 0.15, num_steps=3, **target, **options)
    sampler.set_mass(masses)
    offsets = [o for group in sampler.param_groups for o in group["offsets"]]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    momenta = []
    accepted, seen = 0, set()
    for step in range(40):
        if not momenta or (every and step % every == 0):
            momenta = [torch.empty_like(m) for m in masses]
            stream = {"offsets": offsets, "seed": -5, "step": step}
            ops.hmc_momenta_(momenta, masses, temperature=temperature, **stream)
        start = [t.detach().clone() for t in twins]
        turned = [-r for r in momenta]
        of = (twins, Quartic(twins, True), momenta, masses, priors)
        ratios = by_hand(*of, chains, temperature)
        decision = {"proposal": 0, "purpose": _C.Purpose.METROPOLIS, "seed": -5}
        yes = ops.metropolis_decide(ratios, **decision, step=step)
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


ONE_OF_TWO = "Invalid num_steps and trajectory_length: {} (give exactly one of them)"


@pytest.mark.parametrize(
    ("name", "value", "both"),
    [("num_steps", None, "None and None"), ("trajectory_length", 1.0, "3 and 1.0")],
)
def test_a_length_is_given_once(name, value, both):
    error, text = ValueError, ONE_OF_TWO.format(both)
    with refused(error, text):
        sg.HMC(two(), **{**GOOD, name: value})
    params = two()
    sampler = sg.HMC(params, **GOOD)
    sampler.step(Quartic(params))
    sampler.param_groups[0][name] = value
    step_fails(sampler, Quartic(params), error, text)
    state = sampler.state_dict()
    with refused(error, text):
        sg.HMC(two(), **GOOD).load_state_dict(state)
    with refused(error, text):
        sampler.warmup(Quartic(params), 1)


def test_groups_must_stay_equal():
    params, others = two(), two()
    sampler = sg.HMC([{"params": params}], **GOOD)
    sampler.param_groups[0]["step_size"] = 0.07
    sampler.step(Quartic(params))
    # A group that is added takes what the sampler has come to.
    sampler.add_param_group({"params": others, "prior_precision": 2.0})
    assert sampler.param_groups[1]["step_size"] == 0.07
    assert sampler.param_groups[1]["num_trajectories"] == 1
    sampler.step(Quartic(params + others))
    sampler.param_groups[1]["step_size"] = 0.08
    equal = "must be equal: there is one trajectory for all"
    message = f"Invalid step_size: [0.07, 0.08] in the param groups ({equal})"
    step_fails(sampler, Quartic(params + others), ValueError, message)


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"num_steps": 1}, 2),
        ({"num_steps": 5}, 6),
        ({"trajectory_length": 0.349}, 4),
        ({"trajectory_length": 0.351}, 5),
        ({"trajectory_length": 0.001}, 2),
    ],
)
def test_the_number_of_gradients(settings, calls):
    settings = {"num_steps": None, **settings}
    params = two()
    closure = Quartic(params)
    with torch.no_grad():
        loss = sg.HMC(params, **{**GOOD, **settings}).step(closure)
    assert len(closure.losses) == calls
    assert loss is closure.losses[0]
    assert all(p.grad is not None for p in params)


def test_losses_of_wrong_kinds():
    params = two()
    sampler = sg.HMC(params, **GOOD)

    def returning(value):
        def closure():
            for p in params:
                p.grad = torch.ones_like(p)
            return value

        return closure

    message = (
        "HMC got no loss from the closure, which must return it for the Metropolis "
        "test (metropolis=False makes none)"
    )
    step_fails(sampler, returning(None), TypeError, message)
    for shape in ([1], [3], [2, 2]):
        message = f"Invalid loss: shape {shape} (must be a scalar)"
        step_fails(sampler, returning(torch.zeros(shape)), ValueError, message)
    message = "not finite at the start of a trajectory"
    message = f"HMC got a loss or parameters that are {message}"
    for value in (math.nan, math.inf, torch.tensor(math.nan)):
        step_fails(sampler, returning(value), RuntimeError, message)
    sampler.step(returning(1.0))  # a number will do
    sampler.step(returning(torch.tensor(1.0, dtype=torch.bfloat16)))
    # Without a test the loss is not looked at.
    plain = sg.HMC(params, **GOOD, metropolis=False)
    assert plain.step(returning(None)) is None
    assert plain.step(returning("loss")) == "loss"


CHANGED = (
    "HMC got another loss at the start of 3 consecutive trajectories than at the end "
    "of the previous one, at the same parameters: the closure must always compute the "
    "same loss, of all data (no minibatches, no dropout), unless other quantities that "
    "it depends on are sampled in between"
)


@pytest.mark.parametrize("num_chains", [None, 4])
def test_losses_that_change(num_chains):
    # θ⁴ / 4 with an offset of its own at each step, in the last chain: all that
    # minibatches do to the loss at one point.
    def warnings_of(change, moves=False, **settings):
        params = [nn.Parameter(torch.ones(4, 2))]
        sampler = sg.HMC(params, **GOOD, num_chains=num_chains, **settings)

        def closure(step):
            losses = params[0].pow(4).sum(1) / 4
            losses.sum().backward()
            losses = losses + step * change * torch.tensor([0.0, 0, 0, 1])
            return losses if num_chains else losses.sum()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(9):
                sampler.step(lambda step=step: closure(step))
                if moves:
                    with torch.no_grad():
                        params[0].add_(0.01)
        assert all(w.filename == __file__ for w in caught)
        return [str(w.message) for w in caught]

    assert warnings_of(0.1) == [CHANGED]
    # A change of no account, parameters that the user moves, and no test.
    assert warnings_of(1e-3) == []
    assert warnings_of(0.1, moves=True) == []
    assert warnings_of(0.1, metropolis=False) == []


def test_losses_of_chains_of_wrong_shapes():
    p = nn.Parameter(torch.ones(4, 2))
    sampler = sg.HMC([p], **GOOD, num_chains=4)

    def closure(shape):
        p.grad = torch.ones_like(p)
        return torch.zeros(shape)

    for shape in ((), (3,), (4, 1)):
        wanted = "must be [4], the mean loss of each chain; call backward() on its sum"
        message = f"Invalid loss: shape {list(shape)} ({wanted})"
        step_fails(sampler, partial(closure, shape), ValueError, message)
    sampler.step(lambda: closure((4,)))


def test_a_loss_as_a_number_keeps_its_digits():
    """A Python float has those of float64."""
    found = []
    for as_number in (False, True):
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        sampler = sg.HMC([p], 1.2e-4, num_steps=3, num_data=1e8, seed=0)

        def closure(p=p, as_number=as_number):
            loss = p.square().sum() / 2 + 7
            loss.backward()
            return loss.item() if as_number else loss

        for _ in range(50):
            sampler.step(closure)
        found.append((p.item(), sampler.acceptance_rate))
    assert found[0] == found[1] and found[0][1] > 0.7
