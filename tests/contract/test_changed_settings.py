"""Momenta, records and estimates in a step after a change of lr, T or N."""

import copy
import math

import pytest
import torch
from every_sampler import bits
from torch.optim import lr_scheduler

import torch_sgmcmc as sg


def _one(kind=sg.SGHMC, **settings):
    p = torch.zeros(1000, requires_grad=True)
    p.grad = torch.zeros(1000)
    shared = {"num_data": 100, "seed": 5, **settings}
    sampler = kind([p], 0.1, 0.9, **shared)
    sampler.step()
    return p, sampler


@pytest.mark.parametrize(
    "kind", [sg.SGLD, sg.SGLRW, sg.SGHMC, sg.BAOA, sg.PSGLD, sg.SGNHT, sg.EWSG]
)
def test_nothing_happens_at_lr_0(kind):
    p = torch.zeros(10, requires_grad=True)
    options = {"gamma": False} if kind is sg.PSGLD else {}
    sampler = kind([p], 0.1, num_data=10, seed=1, **options)

    def closure():
        p.grad = torch.randn(10)
        return 1.5

    sampler.step(closure)
    before, theta = copy.deepcopy(sampler.state_dict()), p.detach().clone()
    sampler.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        assert sampler.step(closure) == 1.5
    assert torch.equal(p, theta)
    before["param_groups"][0]["lr"] = 0.0
    assert bits(sampler.state_dict()) == bits(before)


def test_first_momenta_are_made_at_the_first_lr():
    p = torch.zeros(20_000, requires_grad=True)
    p.grad = torch.zeros(20_000)
    sampler = sg.SGHMC([p], 0.0, 0.9, num_data=100, seed=5)
    sampler.step()
    assert not sampler.state[p]["momentum"].any()  # a checkpoint may fill it
    assert sampler.param_groups[0]["momentum_settings"] == []
    sampler.param_groups[0]["lr"] = 0.2
    sampler.step()
    assert sampler.param_groups[0]["momentum_settings"] == [0.2, 1.0, 100.0]
    momentum = sampler.state[p]["momentum"]
    assert float(momentum.var()) == pytest.approx(0.2 / 100, rel=0.05)


@pytest.mark.parametrize(
    ("first", "changes"), [(1.0, {"lr": 0.02}), (1.0, {"temperature": 0.0}), (0.0, {})]
)
def test_a_failed_step_leaves_momenta_and_record(first, changes):
    p, sampler = _one(temperature=first)
    before = sampler.state[p]["momentum"].clone()
    sampler.param_groups[0].update({"temperature": 1.0, **changes})
    p.grad = torch.full((1000,), math.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        sampler.step()
    assert torch.equal(sampler.state[p]["momentum"], before)
    assert sampler.param_groups[0]["momentum_settings"] == [0.1, first, 100.0]


def test_temperatures_are_of_the_new_lr():
    """TemperatureMonitor read momenta as the step will have them."""
    p = torch.zeros(20_000, requires_grad=True)
    sampler = sg.SGHMC([p], 0.1, 0.9, num_data=100, prior_precision=100.0, seed=5)
    monitor = sg.TemperatureMonitor(sampler, every=1)
    for k in range(400):
        for group in sampler.param_groups:
            group["lr"] = 0.1 * 0.97 ** (k % 100)
        p.grad = torch.zeros_like(p)
        sampler.step()
    assert monitor.all().kinetic.mean == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize("kind", [sg.SGHMC, sg.SGNHT])
def test_capturable_samplers_follow(kind):
    """A separate rescaling pass gives the same chain up to rounding."""

    def chain(capturable):
        p = torch.zeros(1000, dtype=torch.float64, requires_grad=True)
        q = torch.zeros(10, dtype=torch.float64, requires_grad=True)
        sampler = kind([p, q], 0.1, 0.9, num_data=100, seed=5, capturable=capturable)
        for k in range(60):
            sampler.param_groups[0]["lr"] = 0.1 if k < 20 else 0.1 * 0.9 ** (k - 20)
            p.grad = p.detach().clone()
            q.grad = None if 25 < k < 30 else q.detach().clone()
            sampler.step()
        return torch.cat([p.detach(), q.detach()])

    torch.testing.assert_close(chain(True), chain(False), rtol=1e-9, atol=1e-12)


def test_first_momenta_beside_others_that_are_rescaled():
    """Each has the variance of the new settings: none is multiplied twice."""
    a, b = (torch.zeros(20_000, requires_grad=True) for _ in range(2))
    for kind in (sg.SGHMC, sg.BAOA, sg.SGNHT):
        for lr in (1e-3, 1.0):
            sampler = kind([a, b], 0.1, 0.9, num_data=100, seed=1)
            a.grad, b.grad = torch.zeros_like(a), None
            sampler.step()
            sampler.param_groups[0]["lr"] = lr
            b.grad = torch.zeros_like(b)
            sampler.step()
            for p in (a, b):
                variance = float(sampler.state[p]["momentum"].var())
                assert variance == pytest.approx(lr / 100, rel=0.05)


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.05}, {"num_data": 1600.0}, {"lr": 0.1}]
)
def test_thermostats_do_not_blow_up(changes):
    """Their fluctuations are not multiplied where the ratio of β̂ is above 1."""
    p = torch.zeros(2000, dtype=torch.float64, requires_grad=True)
    lr = 0.01 if "lr" in changes else 0.1
    sampler = sg.SGNHT([p], lr, 0.9, num_data=100, seed=1)
    worst = 0.0
    for k in range(1700):
        if k == 1500:
            sampler.param_groups[0].update(changes)
        p.grad = p.detach().clone()
        sampler.step()
        if k >= 1500:
            group = sampler.param_groups[0]
            scale = group["num_data"] / group["temperature"]
            worst = max(worst, scale * float(p.detach().var()))
    # θ itself is still that of the old target, 1.6 and 20 times as wide, at first.
    first = {"temperature": 20, "num_data": 16, "lr": 1}[next(iter(changes))]
    assert worst < 1.25 * first
    assert sampler.state[p]["thermostat"].abs().max() < 1


def test_groups_that_are_replaced_keep_their_records():
    a, b = (torch.zeros(5000, requires_grad=True) for _ in range(2))
    for p in (a, b):
        p.grad = torch.zeros_like(p)
    groups = [{"params": [a]}, {"params": [b], "lr": 0.001}]
    sampler = sg.SGHMC(groups, 0.1, 0.9, num_data=100, seed=1)
    sampler.step()
    sampler.param_groups = [dict(group) for group in sampler.param_groups]
    for k in range(5):
        sampler.step()
        for p, group in zip((a, b), sampler.param_groups, strict=True):
            assert group["momentum_settings"] == [group["lr"], 1.0, 100.0]
            variance = float(sampler.state[p]["momentum"].var())
            assert variance == pytest.approx(group["lr"] / 100, rel=0.1)
        if k == 1:
            for group in sampler.param_groups:
                group["lr"] *= 0.5


def test_an_estimate_is_given_again_after_none():
    _, sampler = _one(noise_estimate=0.05)
    group = sampler.param_groups[0]
    for changes in ({"noise_estimate": 0.0}, {"lr": 0.01, "noise_estimate": 0.05}):
        group.update(changes)
        sampler.step()
    assert group["noise_estimate_settings"] == [0.05, 0.01, 1.0, 100.0]


@pytest.mark.parametrize("between", ["a new group", "an observation"])
def test_an_estimate_belongs_to_the_next_step_of_its_group(between):
    p, sampler = _one(noise_estimate=0.05)
    group = sampler.param_groups[0]
    group["noise_estimate"] = 0.02
    if between == "a new group":
        sampler.add_param_group({"params": [torch.zeros_like(p, requires_grad=True)]})
    else:
        monitor = sg.TemperatureMonitor(sampler, every=1000)
        monitor.observe(lambda: p.sum().backward())
    group["lr"] = 0.03
    sampler.step()
    assert group["noise_estimate_settings"] == [0.02, 0.03, 1.0, 100.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("key", ["lr", "temperature"])
@pytest.mark.parametrize("tiny", [1e-80, 1e-320])
@pytest.mark.parametrize("kind", [sg.SGHMC, sg.BAOA, sg.SGNHT, sg.EWSG])
def test_a_factor_that_is_no_normal_number(kind, tiny, key, dtype):
    """Momenta are then drawn."""
    p = torch.zeros(4000, dtype=dtype, requires_grad=True)
    sampler = kind([p], 0.1, 0.9, num_data=100, seed=5)

    def closure():
        p.grad = torch.zeros_like(p)
        return 0.0

    group = sampler.param_groups[0]
    first = group[key]
    for value in (first, first, tiny, tiny, first):
        group[key] = value
        sampler.step(closure)
        assert bool(p.isfinite().all())
        momentum, former = sampler.state[p]["momentum"], group["momentum_settings"]
        assert former[:2] == [group["lr"], group["temperature"]]
    assert float(momentum.var()) == pytest.approx(0.1 / 100, rel=0.15)


@pytest.mark.parametrize(
    ("dtype", "momentum"),
    [(torch.float32, -0.1), (torch.float64, -0.1 * (1 + 0.9 + 0.81))],
)
def test_such_a_factor_without_temperature(dtype, momentum):
    """float32 begins with momenta of 0; float64 holds the factor."""
    p = torch.zeros(10, dtype=dtype, requires_grad=True)
    p.grad = torch.ones_like(p)
    sampler = sg.SGHMC([p], 0.1, 0.9, num_data=100, temperature=0.0, seed=5)
    for lr in (0.1, 1e-80, 0.1):
        sampler.param_groups[0]["lr"] = lr
        sampler.step()
    expected = torch.full_like(p, momentum)
    torch.testing.assert_close(sampler.state[p]["momentum"], expected.detach())


def test_a_warm_up_from_0_is_silent(recwarn):
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.ones(3)
    sampler = sg.SGLD([p], 0.1, num_data=10, seed=1)
    scheduler = lr_scheduler.LambdaLR(sampler, lambda k: min(1.0, k / 3))
    for _ in range(5):
        sampler.step()
        scheduler.step()
    assert not [w for w in recwarn if "counted a step" in str(w.message)]
    assert sampler.param_groups[0]["step"] == 4


def test_groups_have_records_of_their_own():
    """A change of one group's lr leaves the other's momenta."""
    a, b = (torch.zeros(100, requires_grad=True) for _ in range(2))
    for p in (a, b):
        p.grad = torch.zeros(100)

    def made(change):
        for p in (a, b):
            p.data.zero_()
        groups = [{"params": [a]}, {"params": [b], "lr": 0.2}]
        sampler = sg.SGHMC(groups, 0.1, 0.9, num_data=100, seed=5)
        sampler.step()
        if change:
            sampler.param_groups[0]["lr"] = 0.01
        sampler.step()
        return sampler

    plain = made(False).state[b]["momentum"].clone()
    changed = made(True)
    assert torch.equal(changed.state[b]["momentum"], plain)
    records = [g["momentum_settings"] for g in changed.param_groups]
    assert records == [[0.01, 1.0, 100.0], [0.2, 1.0, 100.0]]
    # A group that is added later begins with a record of its own.
    c = torch.zeros(5, requires_grad=True)
    changed.add_param_group({"params": [c], "lr": 0.5})
    assert changed.param_groups[2]["momentum_settings"] == []


@pytest.mark.parametrize(
    "record", [[0.1, 1.0], [0.0, 1.0, 2.0], [0.1, math.nan, 1.0], "x", [1, 1, 1]]
)
def test_saved_records_are_checked(record):
    _, sampler = _one()
    saved = sampler.state_dict()
    saved["param_groups"][0]["momentum_settings"] = record
    with pytest.raises(ValueError, match="Invalid momentum_settings"):
        sampler.load_state_dict(saved)


def test_a_noise_estimate_that_outgrows_the_friction():
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.ones(3)
    sampler = sg.SGHMC([p], 0.1, 0.9, num_data=10, noise_estimate=0.06, seed=1)
    sampler.step()
    before = p.detach().clone()
    sampler.param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"0\.12 at lr 0\.2, .*from 0\.06 at lr 0\.1,"):
        sampler.step()
    assert torch.equal(p, before)
    # Given again, it belongs to the new lr.
    sampler.param_groups[0]["noise_estimate"] = 0.07
    sampler.step()


@pytest.mark.parametrize("kind", [sg.SGLD, sg.SGHMC])
@pytest.mark.parametrize("lr", [1e90, float("inf"), float("nan"), -0.1])
def test_an_lr_that_changes_alone_is_checked(kind, lr):
    """Steps with a cached plan check lr alone, and refuse one that overflows."""
    params = [torch.ones(4, requires_grad=True) for _ in range(2)]
    whole, other = (kind([p], lr=0.1, num_data=1, seed=0) for p in params)
    for step in range(5):
        for p in params:
            p.grad = p.detach().clone()
        rate = 0.1 / (1 + step)
        for sampler in (whole, other):
            sampler.param_groups[0]["lr"] = rate
        if step == 3:
            other.param_groups[0]["lr"] = lr
            with pytest.raises(ValueError, match="Invalid lr"):
                other.step()
            other.param_groups[0]["lr"] = rate
        whole.step()
        other.step()
    assert torch.equal(*params)
