"""Gradients that are not finite reach neither parameters nor state."""

import copy
import pickle

import pytest
import short_chains as chains
import torch
from ecs_data import Data
from ecs_data import make as make_ecs
from failed_steps import assert_unchanged, refused, snapshot
from sbps_chains import Draws
from sbps_chains import make as make_sbps
from sbps_chains import two as two_for_sbps
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core.step_plan import StepPlan

BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}
EACH = pytest.mark.parametrize("value", BAD)
ENDS = (
    " The step was not made. If losses have grown, the chain has diverged and needs a "
    "smaller lr; where it is rare, nonfinite='skip' skips such steps"
)

# At which calls of the closure in a step it is looked, where there are several.
CALLS = {"EWSG": (0, 1, 2), "EWSG overdamped": (0, 1), "HMC without test": (0, 1)}


def poison(p, value):
    """The last element; the gradient keeps its graph."""
    index = torch.tensor([p.numel() - 1])
    p.grad = p.grad.index_fill(0, index, BAD[value])


def bad_step(sampler, params, step, value, call=0, which=2):
    """A step of which one gradient is not finite, at one call of the closure."""
    calls = 0

    def edit():
        nonlocal calls
        if calls == call:
            poison(params[which], value)
        calls += 1

    chains.take_step(sampler, params, step, edit)


def message(sampler, value, got="got"):
    nans = int(value == "nan")
    return (
        f"{type(sampler).__name__} {got} a gradient that is not finite: {nans} NaN and "
        f"{1 - nans} infinite of 257 elements, for parameter 2 of group 0, of shape "
        f"[257].{ENDS}"
    )


# Which gradients are read, when, and what is put back is each sampler's own; in a first
# step there is no state yet.
@pytest.mark.parametrize(
    ("value", "kind", "done"),
    [
        *(("-inf", kind, 3) for kind in chains.ANY_DRAWS),
        *(("nan", kind, 0) for kind in (*chains.THREE, "EWSG")),
    ],
)
def test_raise_and_skip(value, kind, done):
    for call in CALLS.get(kind, (0,)):
        params, skipping, others = (
            chains.make_params(),
            chains.make_params(),
            chains.make_params(),
        )
        raises, unbroken = chains.make(kind, params), chains.make(kind, others)
        skips = chains.make(kind, skipping, nonfinite="skip")
        everyone = ((raises, params), (skips, skipping), (unbroken, others))
        for sampler, theirs in everyone:
            chains.advance(sampler, theirs, range(done))
        before = snapshot(raises)
        with refused(RuntimeError, message(raises, value)):
            bad_step(raises, params, 77, value, call)
        assert_unchanged(raises, before)
        assert raises.num_skipped == 0
        before = snapshot(skips)
        for n in (1, 2):
            bad_step(skips, skipping, 77, value, call)
            assert skips.num_skipped == n
        for group in before[1]["param_groups"]:
            group["num_skipped"] += 2
            if "num_drawn" in group:  # what was drawn is not drawn again
                now = skips.param_groups[0]["num_drawn"]
                assert now > group["num_drawn"]
                group["num_drawn"] = now
        assert_unchanged(skips, before)
        for sampler, theirs in everyone:
            chains.advance(sampler, theirs, range(done, 6))
        chains.assert_same(params, others)
        chains.assert_same(skipping, others)
        ours, theirs = skips.state_dict()["state"], unbroken.state_dict()["state"]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*chains.THREE, "EWSG"])
@EACH
def test_allow(value, kind):
    params = chains.make_params()
    sampler = chains.make(kind, params, nonfinite="ignore")
    chains.advance(sampler, params, range(2))
    bad_step(sampler, params, 2, value)
    assert sampler.num_skipped == 0 and sampler.param_groups[0]["step"] == 3
    finite = [bool(p.isfinite().all()) for p in params]
    if (
        chains.KINDS[kind][0] is sg.HMC and "without" not in kind
    ):  # trajectories are rejected
        assert all(finite) and sampler.num_divergences == 1
    elif kind not in ("EWSG", "EWSG overdamped"):  # another minibatch may be accepted
        assert finite == [True, True, False, True, True, True]


@EACH
def test_a_trajectory_that_meets_one_is_rejected(value):
    for choice in ("raise", "skip", "ignore"):
        params = chains.make_params()
        sampler = chains.make("HMC", params, nonfinite=choice)
        before = [p.detach().clone() for p in params]
        bad_step(sampler, params, 0, value, call=2)
        chains.assert_same(params, before)
        assert sampler.num_divergences == 1 and sampler.num_skipped == 0
        assert sampler.param_groups[0]["step"] == 1


def test_the_parameter_is_named():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    sampler = sg.SGLD(net.named_parameters(), 0.1, num_data=5)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net[0].bias.grad[1:] = torch.tensor([torch.nan, -torch.inf])
    net[1].weight.grad[0, 0] = torch.inf
    message = "SGLD got a gradient that is not finite: 1 NaN and 1 infinite of 3"
    where = f"elements, for parameter '0.bias' (and for 1 more).{ENDS}"
    with refused(RuntimeError, f"{message} {where}"):
        sampler.step()


def test_second_derivatives():
    for choice in ("raise", "skip"):
        p = nn.Parameter(torch.tensor([1.0, 0.0, 4.0]))
        sampler = sg.PSGLD([p], 0.1, num_data=5, seed=0, nonfinite=choice)
        before = snapshot(sampler)

        def closure(p=p):
            p.grad = p.abs() ** 1.5  # of no finite slope at 0 by autograd
            p.grad = p.grad + (p - p.detach()).sign() * (p * 0).sqrt()

        closure()
        assert bool(p.grad.isfinite().all())
        if choice == "skip":
            sampler.step()
            assert sampler.num_skipped == 1
            for group in before[1]["param_groups"]:
                group["num_skipped"] += 1
        else:
            with pytest.raises(RuntimeError) as error:
                sampler.step()
            start = "PSGLD got a second derivative (for Γ) that is not finite: "
            assert str(error.value).startswith(start)
        assert_unchanged(sampler, before)


def test_sbps():
    def with_infinite_slope(draws):
        return draws() + (0 * draws.params[0].sum()).sqrt()

    def with_nan(draws):
        return draws() * torch.tensor([torch.nan] + 9 * [1.0])

    for settings in ({}, {"preconditioned": True, "decay": 0.5}):
        params, others = two_for_sbps(), two_for_sbps()
        sampler = make_sbps(params, nonfinite="skip", **settings)
        unbroken = make_sbps(others, **settings)
        for i in range(60):
            before = snapshot(sampler)
            bad, draws = (with_nan, with_infinite_slope)[i % 2], Draws(params)
            losses = sampler.step(lambda bad=bad, draws=draws: bad(draws))
            assert losses.shape == (10,) and not losses.requires_grad
            assert sampler.num_skipped == i + 1
            for group in before[1]["param_groups"]:
                group["num_skipped"] += 1
            assert_unchanged(sampler, before)
            for one, theirs in ((sampler, params), (unbroken, others)):
                draws = Draws(theirs)
                draws.generator.manual_seed(i)
                one.step(draws)
        assert sampler.diagnostics.bounces == unbroken.diagnostics.bounces > 0
        chains.assert_same(params, others)


@pytest.mark.parametrize("always", [False, True])
def test_sbps_where_only_the_gradient_is_not_finite(always):
    # Only its length overflows: all examples have the same, so that the variance of the
    # derivatives along the line does not.
    def with_huge_gradient(params):
        return (1e160 * params[0].sum()).expand(10)

    for choice in ("raise", "skip"):
        params = [nn.Parameter(torch.zeros(6, dtype=torch.float64))]
        draws = Draws(params)
        learning = {"preconditioned": always, "adapt_every_step": always}
        sampler = make_sbps(params, nonfinite=choice, **learning)
        bad = 0
        for _ in range(40):
            sampler.step(draws)
            before = snapshot(sampler)
            try:
                sampler.step(lambda params=params: with_huge_gradient(params))
                left_out = sampler.num_skipped > bad
            except RuntimeError as error:
                text = "SBPS got a gradient from the closure's losses that is not fin"
                assert str(error).startswith(text)
                left_out = True
            if left_out:
                bad += 1
                for group in before[1]["param_groups"]:
                    group["num_skipped"] += choice == "skip"
                assert_unchanged(sampler, before)
            else:  # not a proposal: as if it had not been
                assert not always
                with torch.no_grad():
                    params[0].copy_(before[0][0])
                sampler.load_state_dict(before[1])
        assert bad > 3 and sampler.num_skipped == bad * (choice == "skip")


def test_hmcecs():
    for choice in ("raise", "skip"):
        data, other = Data(), Data()
        sampler, unbroken = make_ecs(data, nonfinite=choice), make_ecs(other)
        for _ in range(3):
            sampler.step(data)
            unbroken.step(other)
        kept = data.bias.detach().clone()
        with torch.no_grad():
            data.bias.fill_(torch.nan)
        if choice == "raise":
            with pytest.raises(RuntimeError, match="not finite at the start of a step"):
                sampler.step(data)
        else:
            loss = sampler.step(data)
            assert loss.dtype == torch.float64 and bool(loss.isnan())
        assert sampler.num_skipped == int(choice == "skip")
        with torch.no_grad():
            data.bias.copy_(kept)
        for _ in range(3):
            sampler.step(data)
            unbroken.step(other)
        chains.assert_same(data.params, other.params)
        with torch.no_grad():
            data.bias.fill_(torch.nan)
        with pytest.raises(RuntimeError):  # a warm-up cannot do without its steps
            sampler.warmup(data, 3, progress=False)


def test_a_warm_up_of_hmc_leaves_steps_out():
    params = chains.make_params()
    sampler = chains.make("HMC", params, nonfinite="skip")

    def closure():
        chains.set_grads(params, 0)
        poison(params[0], "nan")
        return sum(p.detach().square().sum() for p in params)

    step_size = sampler.param_groups[0]["step_size"]
    sampler.warmup(closure, 3, finish=False, progress=False)
    assert sampler.num_skipped == 3
    assert sampler.param_groups[0]["step_size"] == step_size


def test_choices():
    p = nn.Parameter(torch.ones(2))
    wanted = "Invalid nonfinite: {} (must be 'raise', 'skip' or 'ignore')"
    for value in ("warn", None, True, 1):
        with refused(ValueError, wanted.format(repr(value))):
            sg.SGLD([p], 0.1, num_data=1, nonfinite=value)
    wanted = "Invalid nonfinite: 'ignore' (must be 'raise' or 'skip')"
    for make_one in (make_sbps, lambda q, **s: make_ecs(Data(), **s)):
        with refused(ValueError, wanted):
            make_one([p], nonfinite="ignore")
        other = make_one([p])
        other.param_groups[0]["nonfinite"] = "ignore"
        with refused(ValueError, wanted):
            other.step(lambda *_: pytest.fail("there is nothing to compute yet"))
    with pytest.raises(ValueError, match="'nonfinite' is managed by SGLD"):
        sg.SGLD([{"params": [p], "nonfinite": "skip"}], 0.1, num_data=1)
    q = nn.Parameter(torch.ones(2))
    sampler = sg.SGLD([{"params": [p]}, {"params": [q]}], 0.1, num_data=1)
    p.grad = q.grad = torch.ones(2)
    sampler.param_groups[1]["nonfinite"] = "ignore"
    both = "['raise', 'ignore'] in the param groups"
    equal = "(must be equal: a step is skipped as a whole)"
    with refused(ValueError, f"Invalid nonfinite: {both} {equal}"):
        sampler.step()
    assert sampler.param_groups[0]["step"] == 0


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC capturable", "EWSG", "HMC"])
def test_checkpoints(kind):
    params = chains.make_params()
    sampler = chains.make(kind, params, nonfinite="skip")
    chains.advance(sampler, params, range(2))
    bad_step(sampler, params, 2, "nan")
    saved = copy.deepcopy(sampler.state_dict())
    twin = chains.make(kind, chains.make_params())
    twin.load_state_dict(saved)
    assert twin.num_skipped == 1 and twin.param_groups[0]["nonfinite"] == "skip"
    twin.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert int(twin.param_groups[1]["num_skipped"]) == 1
    assert twin.param_groups[1]["nonfinite"] == "skip"
    saved = sampler.state_dict()
    saved["param_groups"][0]["nonfinite"] = "warn"
    with pytest.raises(ValueError, match="Invalid nonfinite: 'warn'"):
        chains.make(kind, chains.make_params()).load_state_dict(saved)


LATER = ["SGLD", "SGHMC", "PSGLD without gamma"]


@pytest.fixture
def deferred(monkeypatch):
    """Treats the CPU as a GPU is treated, once there is state."""
    monkeypatch.setattr(StepPlan, "_defers", staticmethod(lambda p: True))


def two(kind, **options):
    """Returns two equal chains of two steps, the first of them with these options."""
    made = []
    for own in (options, {}):
        params = chains.make_params()
        made.append((chains.make(kind, params, **own), params))
        chains.advance(*made[-1], range(2))
    return made


@pytest.mark.parametrize("kind", LATER)
def test_what_the_device_finds_is_raised_later(kind, deferred):
    (sampler, params), (unbroken, others) = two(kind)
    chains.assert_same(params, others)
    before = snapshot(sampler)
    looks = (lambda: None, sampler.state_dict, lambda: pickle.dumps(sampler.state))
    for value, look in zip(BAD, looks, strict=True):
        bad_step(sampler, params, 7, value)
        chains.assert_same(params, before[0])
        look()
        with refused(RuntimeError, message(sampler, value, "got in its last step")):
            sampler.step(lambda: pytest.fail("there is nothing to compute yet"))
        assert_unchanged(sampler, before)
    chains.advance(sampler, params, range(2, 6))
    chains.advance(unbroken, others, range(2, 6))
    chains.assert_same(params, others)
    assert sampler.num_skipped == 0
    assert sampler.param_groups[0]["step"] == 6


@pytest.mark.parametrize("kind", [*LATER, "SGHMC capturable"])
@pytest.mark.parametrize("value", BAD)
def test_the_host_waits_for_a_step_that_creates_state(kind, value, deferred):
    test_raise_and_skip(value, kind, 0)


@pytest.mark.parametrize("kind", LATER)
def test_what_the_device_leaves_out_is_counted(kind, deferred):
    (sampler, params), (unbroken, others) = two(kind, nonfinite="skip")
    for i in range(2, 5):
        bad_step(sampler, params, 7, "inf")
        if i % 2:
            assert sampler.num_skipped == i - 1
        bad_step(sampler, params, 8, "nan") if i == 4 else None
        chains.take_step(sampler, params, i)
        chains.take_step(unbroken, others, i)
        chains.assert_same(params, others)
    assert sampler.num_skipped == 4
    bad_step(sampler, params, 9, "nan")
    assert copy.deepcopy(sampler).param_groups[0]["step"] == 5
    saved = sampler.state_dict()
    assert saved["param_groups"][0]["step"] == 5
    assert saved["param_groups"][0]["num_skipped"] == 5


def test_a_deferred_check_ends_with_its_chain(deferred):
    params = chains.make_params()
    sampler = chains.make("SGLD", params)
    chains.advance(sampler, params, range(2))
    saved = copy.deepcopy(sampler.state_dict())
    bad_step(sampler, params, 2, "nan")
    sampler.load_state_dict(saved)
    chains.take_step(sampler, params, 2)
    assert sampler.param_groups[0]["step"] == 3


CAPTURABLE = [k for k in chains.KINDS if "capturable" in k]


@pytest.mark.parametrize("kind", CAPTURABLE)
def test_counters_on_the_device(kind, deferred):
    # As in a CUDA graph, which the host does not see: nothing is raised.
    choice = "raise" if kind == CAPTURABLE[0] else "skip"
    (sampler, params), (unbroken, others) = two(kind, nonfinite=choice)
    for i in range(2, 5):
        for value in BAD:
            bad_step(sampler, params, 7, value)
        chains.take_step(sampler, params, i)
        chains.take_step(unbroken, others, i)
        chains.assert_same(params, others)
    assert int(sampler.param_groups[0]["step"]) == 5
    assert sampler.num_skipped == 9


@pytest.mark.full
def test_compiled_steps():
    params, others = chains.make_params(), chains.make_params()
    sampler = chains.make("SGHMC", params, capturable=True)
    unbroken = chains.make("SGHMC", others, capturable=True)
    torch._dynamo.reset()
    step = torch.compile(sampler.step, backend="aot_eager")
    try:
        for i in range(6):
            if i in (0, 3):
                chains.set_grads(params, 9)
                params[1].grad = params[1].grad.detach()
                params[1].grad[-1] = torch.nan
                step()
            for theirs, make_step in ((params, step), (others, unbroken.step)):
                chains.set_grads(theirs, i)
                make_step()
            chains.assert_same(params, others)
    finally:
        torch._dynamo.reset()
    assert sampler.num_skipped == 2 and int(sampler.param_groups[0]["step"]) == 6
