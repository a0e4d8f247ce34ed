"""Cyclical step sizes and temperatures, and polynomial decay."""

import copy
import math
from functools import partial

import pytest
import torch
from driver_problem import run
from reference import assert_same_bits
from torch.optim.lr_scheduler import LinearLR, PolynomialLR, SequentialLR

import torch_sgmcmc as sg

SAMPLERS = {"SGLD": sg.SGLD, "SGHMC": sg.SGHMC, "SGNHT": sg.SGNHT}
SAMPLERS |= {"PSGLD": partial(sg.PSGLD, gamma=False), "PSGLD with Γ": sg.PSGLD}


def quadratic(p, *, graph=False):
    p.grad = None
    (p * p).sum().backward(create_graph=graph)


def sampler_of(name, *, lr=0.04, seed=0):
    p = torch.zeros(5, requires_grad=True)
    return SAMPLERS[name]([p], lr, num_data=1.0, seed=seed)


def moved(sampler, schedule, steps):
    (p,) = sampler.param_groups[0]["params"]
    trace = []
    for _ in range(steps):
        quadratic(p, graph=sampler.param_groups[0].get("gamma", False))
        sampler.step()
        schedule.step()
        trace.append(p.detach().clone())
    return trace


def test_cycles_are_the_paper_s():
    """Equation 1, with k from 1 and K / M = 7 of 3 cycles, and algorithm 1's phases."""
    p, q = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    groups = [{"params": [p]}, {"params": [q], "lr": 0.5, "temperature": 0.25}]
    sampler = sg.SGLD(groups, lr=0.2, num_data=10, temperature=2.0)
    schedule = sg.CyclicalSchedule(sampler, 7, exploration=0.5)
    for k in range(1, 22):
        r = ((k - 1) % 7) / 7
        started = ((0.2, 2.0), (0.5, 0.25))
        for group, (first, heat) in zip(sampler.param_groups, started, strict=True):
            expected = first / 2 * (math.cos(math.pi * r) + 1)
            assert group["lr"] == pytest.approx(expected, rel=1e-12)
            assert group["temperature"] == (0.0 if r < 0.5 else heat)
        quadratic(p)
        quadratic(q)
        sampler.step()
        assert schedule.collecting == (r >= 0.5)
        assert schedule.cycle == (k - 1) // 7
        assert schedule.place == pytest.approx(r)
        schedule.step()


@pytest.mark.parametrize("name", SAMPLERS)
def test_without_noise_while_exploring_and_with_noise_afterwards(name):
    traces = []
    for seed in (0, 1):
        sampler = sampler_of(name, seed=seed)
        (p,) = sampler.param_groups[0]["params"]
        p.data.fill_(1.0)
        schedule = sg.CyclicalSchedule(sampler, 10, exploration=0.6)
        traces.append(torch.stack(moved(sampler, schedule, 20)))
    assert bool(traces[0].isfinite().all())
    # Whatever the seed, until the sixth step; and then not.
    assert torch.equal(traces[0][:6], traces[1][:6])
    assert not bool((traces[0][6:] == traces[1][6:]).any())


@pytest.mark.parametrize("name", SAMPLERS)
def test_continued_in_the_middle_of_a_cycle_to_the_same_bits(name):
    for at in (3, 8):  # exploring, sampling
        sampler = sampler_of(name)
        schedule = sg.CyclicalSchedule(sampler, 10, exploration=0.6)
        moved(sampler, schedule, 10 + at)
        (p,) = sampler.param_groups[0]["params"]
        saved = copy.deepcopy((sampler.state_dict(), schedule.state_dict(), p.data))
        expected = moved(sampler, schedule, 25)

        other = sampler_of(name, lr=0.1, seed=5)
        again = sg.CyclicalSchedule(other, 4, exploration=0.1)
        other.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        other.param_groups[0]["params"][0].data.copy_(saved[2])
        found = moved(other, again, 25)
        assert torch.equal(torch.stack(found), torch.stack(expected))
        assert again.collecting == schedule.collecting


def test_polynomial_decay_is_welling_and_teh_s():
    p, q = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    groups = [{"params": [p]}, {"params": [q], "lr": 0.5}]
    sampler = sg.SGLD(groups, lr=0.2, num_data=10, seed=0)
    schedule = sg.PolynomialDecay(sampler, b=4, gamma=0.7)
    for t in range(30):
        for group, first in zip(sampler.param_groups, (0.2, 0.5), strict=True):
            a = first * 4**0.7
            assert group["lr"] == pytest.approx(a * (4 + t) ** -0.7, rel=1e-12)
            assert group["temperature"] == 1
        quadratic(p)
        quadratic(q)
        used = sampler.param_groups[0]["lr"]
        sampler.step()
        assert schedule.weight == pytest.approx(used, rel=1e-12)
        schedule.step()


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("exploration", [0.5, 0.0])
def test_cycles_after_a_warm_up(exploration, resumes):
    """torch's SequentialLR takes the first step of later schedules back."""

    def make(seed):
        sampler = sampler_of("SGHMC", seed=seed)
        linear = LinearLR(sampler, 0.1, total_iters=4)
        cycles = sg.CyclicalSchedule(sampler, 4, exploration=exploration)
        return sampler, cycles, SequentialLR(sampler, [linear, cycles], [6])

    sampler, cycles, both = make(0)
    found = []
    for step in range(14):
        if resumes and step in (3, 9):
            saved = copy.deepcopy((sampler.state_dict(), both.state_dict()))
            sampler, cycles, both = make(1)
            sampler.load_state_dict(saved[0])
            both.load_state_dict(saved[1])
        (group,) = sampler.param_groups
        quadratic(group["params"][0])
        sampler.step()
        found.append((group["temperature"], cycles.collecting, cycles.place))
        both.step()
    explores = [step % 4 < 4 * exploration for step in range(8)]
    places = [step % 4 / 4 for step in range(8)]
    assert found == [(1, False, 0)] * 6 + [
        (0 if e else 1, not e, place) for e, place in zip(explores, places, strict=True)
    ]


def test_a_group_that_comes_during_a_warm_up():
    sampler = sampler_of("SGLD")
    linear = LinearLR(sampler, 0.1, total_iters=2)
    cycles = sg.CyclicalSchedule(sampler, 4, exploration=0.5)
    both = SequentialLR(sampler, [linear, cycles], [2])
    sampler.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    found = []
    for _ in range(6):
        for group in sampler.param_groups:
            quadratic(group["params"][0])
        sampler.step()
        found.append([group["temperature"] for group in sampler.param_groups])
        both.step()
    assert found == [[1, 1]] * 2 + [[0, 0]] * 2 + [[1, 1]] * 2


def test_cycles_before_another_schedule():
    sampler = sampler_of("SGLD")
    (group,) = sampler.param_groups
    cycles = sg.CyclicalSchedule(sampler, 4, exploration=0.5)
    last = PolynomialLR(sampler, total_iters=10)
    both = SequentialLR(sampler, [cycles, last], [4])
    found = []
    for _ in range(4):
        quadratic(group["params"][0])
        sampler.step()
        found.append((group["temperature"], cycles.collecting))
        both.step()
    assert found == [(0, False)] * 2 + [(1, True)] * 2


def test_a_whole_run_of_cycles_after_a_warm_up():
    def schedule(sampler):
        linear = LinearLR(sampler, 0.1, total_iters=4)
        cycles = sg.CyclicalSchedule(sampler, 4, exploration=0.5)
        last = PolynomialLR(sampler, total_iters=10)
        return SequentialLR(sampler, [linear, cycles, last], [6, 14])

    store = run(None, schedule=schedule, steps=18, burn_in=0, every=1)
    assert [draw.step for draw in store] == [9, 10, 13, 14]


def test_weights_after_a_warm_up():
    sampler = sampler_of("SGLD", lr=0.1)
    linear = LinearLR(sampler, 0.1, total_iters=4)
    decay = sg.PolynomialDecay(sampler, b=0.5)
    both = SequentialLR(sampler, [linear, decay], [5])
    (group,) = sampler.param_groups
    for _ in range(8):
        quadratic(group["params"][0])
        sampler.step()
        assert decay.weight == group["lr"]
        both.step()
    assert decay.weight == pytest.approx(0.1 * (1 + 3 / 0.5) ** -0.55)


@pytest.mark.parametrize("make", [
    partial(sg.CyclicalSchedule, steps_per_cycle=4), partial(sg.PolynomialDecay, b=4)
])  # fmt: skip
def test_a_state_of_more_groups_is_refused(make):
    p, q = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    two = sg.SGLD([{"params": [p]}, {"params": [q]}], lr=0.2, num_data=10)
    saved = make(two).state_dict()
    schedule = make(sampler_of("SGLD"))
    before = copy.deepcopy(schedule.state_dict())
    with pytest.raises(ValueError, match=r"of 2 param groups \(the sampler has 1\)"):
        schedule.load_state_dict(saved)
    assert schedule.state_dict() == before


def test_samplers_without_lr_are_refused():
    p = torch.zeros(3, requires_grad=True)
    others = (sg.HMC([p], 0.1, num_steps=2, num_data=1), sg.EWSG([p], 0.1, num_data=10))
    others += (sg.SBPS([p], num_data=10), torch.optim.SGD([p], 0.1))
    for make in (sg.CyclicalSchedule, sg.PolynomialDecay):
        for other in others:
            before = copy.deepcopy(other.state_dict())
            with pytest.raises(TypeError, match=f"got {type(other).__name__}"):
                make(other, 10)
            assert_same_bits(other.state_dict(), before)
        graph = sg.SGLD([p], 0.1, num_data=1, capturable=True)
        with pytest.raises(ValueError, match="freezes lr and temperature"):
            make(graph, 10)


def test_wrong_arguments():
    sampler = sampler_of("SGLD")
    cycles, decay = sg.CyclicalSchedule, sg.PolynomialDecay
    for make, arguments, match in (
        (cycles, {"steps_per_cycle": 1}, "steps_per_cycle: 1"),
        (cycles, {"steps_per_cycle": 5, "exploration": 1.0}, "exploration: 1.0"),
        (cycles, {"steps_per_cycle": 5, "exploration": -0.1}, "exploration: -0.1"),
        (decay, {"b": 0}, "b: 0"),
        (decay, {"b": 1, "gamma": 0.5}, "gamma: 0.5"),
        (decay, {"b": 1, "gamma": 1.1}, "gamma: 1.1"),
    ):
        with pytest.raises(ValueError, match=f"Invalid {match}"):
            make(sampler, **arguments)
    assert sampler.param_groups[0]["lr"] == 0.04
    assert "initial_lr" not in sampler.param_groups[0]
    cold = sg.SGLD([torch.zeros(1, requires_grad=True)], 0.1, num_data=1, temperature=0)
    with pytest.raises(ValueError, match="0 in a param group"):
        sg.CyclicalSchedule(cold, 5)


@pytest.mark.parametrize("make", [
    partial(sg.CyclicalSchedule, steps_per_cycle=4, exploration=0.5),
    partial(sg.PolynomialDecay, b=3.0),
])  # fmt: skip
def test_a_group_that_comes_later(make):
    """It is as if it had been there, from the schedule's next step on; after a load."""
    p, q = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)

    def grown(steps):
        sampler = sg.SGLD([p], lr=0.2, num_data=10, seed=0)
        schedule = make(sampler)
        for k in range(steps):
            quadratic(p)
            sampler.step()
            if k == 0:
                sampler.add_param_group({"params": [q], "lr": 0.4, "temperature": 2.0})
            schedule.step()
        return sampler, schedule

    sampler, schedule = grown(1)
    for _ in range(9):
        first, second = sampler.param_groups
        assert second["lr"] == pytest.approx(2 * first["lr"], rel=1e-12)
        assert second["temperature"] == 2 * first["temperature"]
        sampler.step()
        schedule.step()
    other, again = grown(1)
    other.load_state_dict(sampler.state_dict())
    again.load_state_dict(copy.deepcopy(schedule.state_dict()))
    again.step()
    schedule.step()
    for one, same in zip(sampler.param_groups, other.param_groups, strict=True):
        assert (one["lr"], one["temperature"]) == (same["lr"], same["temperature"])


@pytest.mark.parametrize("make", [partial(sg.CyclicalSchedule, steps_per_cycle=4),
                                  partial(sg.PolynomialDecay, b=3.0)])  # fmt: skip
def test_a_later_group_with_a_tensor_as_lr(make):
    """Its first lr stays what it was, while the schedule changes the Tensor."""
    p, q = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    sampler = sg.SGLD([p], lr=torch.tensor(0.2), num_data=10, seed=0)
    schedule = make(sampler)
    sampler.add_param_group({"params": [q], "lr": torch.tensor(0.2)})
    for _ in range(9):
        quadratic(p)
        sampler.step()
        schedule.step()
        first, second = (float(group["lr"]) for group in sampler.param_groups)
        assert second == first
    assert second > 0.01


def test_a_later_group_at_zero_temperature():
    sampler = sampler_of("SGLD")
    schedule = sg.CyclicalSchedule(sampler, 4)
    q = torch.zeros(3, requires_grad=True)
    sampler.add_param_group({"params": [q], "temperature": 0.0})
    before = copy.deepcopy(schedule.state_dict())
    with pytest.raises(ValueError, match="Invalid temperature: 0 in a param group"):
        schedule.step()
    assert schedule.state_dict() == before


@pytest.mark.parametrize("estimate", ["online", 0.1])
def test_cycles_and_a_noise_estimate(estimate):
    p = torch.zeros(5, requires_grad=True)
    options = {"num_data": 10, "noise_estimate": estimate, "seed": 0}
    words = f"Invalid noise_estimate: {estimate!r}, of a sampler that explores without"
    with pytest.raises(ValueError, match=words):
        sg.CyclicalSchedule(sg.SGHMC([p], 0.01, 0.8, **options), 4)
    # Without exploration there is noise in each step.
    sampler = sg.SGHMC([p], 0.01, 0.8, **options)
    schedule = sg.CyclicalSchedule(sampler, 4, exploration=0.0)
    moved(sampler, schedule, 9)
    late = sg.SGHMC([p], 0.01, 0.8, num_data=10, seed=0)
    schedule = sg.CyclicalSchedule(late, 4)
    late.param_groups[0]["noise_estimate"] = estimate
    with pytest.raises(ValueError, match=words):
        schedule.step()


def test_temperatures_read_sampling_phases():
    """T_kin of phases of 100 steps with noise and without, in turns, is nearly T."""
    torch.manual_seed(0)
    p = torch.zeros(2000, requires_grad=True)
    sampler = sg.SGHMC([p], 0.01, 0.5, num_data=1.0, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=1)
    for k in range(1000):
        sampler.param_groups[0]["temperature"] = float(k % 200 >= 100)
        quadratic(p)
        sampler.step()
    assert monitor.num_observed == 500
    # Of each phase, the first steps have momenta without heat.
    assert 0.95 < monitor.all().kinetic.mean < 1.0
    monitor.reset()
    schedule = sg.CyclicalSchedule(sampler, 20, exploration=0.75)
    moved(sampler, schedule, 100)
    assert monitor.num_observed == 25
