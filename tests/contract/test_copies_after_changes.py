"""Copies between a change and the next step, which continue the same chain."""

import copy
import pickle

import pytest
import torch
from every_sampler import bits
from torch import nn

import torch_sgmcmc as sg

N = 50
SHARED = {"num_data": N, "prior_precision": 4.0, "seed": 5}
MEANS = {**SHARED, "prior_mean": [torch.full((3,), 2.0), torch.full((3,), -1.0)]}


def set_all(sampler, **values):
    for group in sampler.param_groups:
        group.update(values)


def write_means(sampler):
    for state in sampler.state.values():
        state["prior_mean"].fill_(0.7)


def masses(params):
    sampler = sg.HMC(params, 0.1, num_steps=3, **MEANS)
    sampler.set_mass([torch.tensor([1.0, 3.0, 9.0])] * 2)
    return sampler


def halved(params):
    half = [nn.Parameter(p.detach().bfloat16()) for p in params]
    return sg.EWSG(half, lr=0.1, momentum=0.0, **SHARED)


def groups_of(params):
    return sg.SGHMC([{"params": [p]} for p in params], lr=0.1, **SHARED)


def rates(sampler):
    sampler.param_groups[0]["lr"] = 0.01
    sampler.param_groups.reverse()


#: How a sampler is made, and what changes after some steps.
CASES = {
    "cleared means": (
        lambda p: sg.SGHMC(p, lr=0.1, preconditioner=[0.5, 2.0], **MEANS),
        lambda s: s.state.clear(),
    ),
    "cleared masses": (masses, lambda s: s.state.clear()),
    "reordered groups": (groups_of, rates),
    "target of a tuned step": (
        lambda p: sg.MCLMC(p, lr=1e-3, tune_steps=60, **SHARED),
        lambda s: set_all(s, temperature=2.0),
    ),
    "means of a line": (lambda p: sg.SBPS(p, refresh_rate=0.2, **MEANS), write_means),
    "first momentum": (halved, lambda s: set_all(s, momentum=0.5)),
}


def make_params():
    g = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(3, generator=g)) for _ in range(2)]


def params_of(sampler):
    return [p for group in sampler.param_groups for p in group["params"]]


def run(sampler, steps):
    for step in steps:
        seed = 0 if isinstance(sampler, sg.HMC) else step  # HMC takes all data
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))

        def losses(x=x):
            away = [(p.float() - x).square().sum(1) / 2 for p in params_of(sampler)]
            return torch.stack(away).sum(0)

        def closure(losses=losses):
            sampler.zero_grad()
            loss = losses().mean()
            loss.backward()
            return loss.detach()

        sampler.step(losses if isinstance(sampler, sg.SBPS) else closure)
    return bits(params_of(sampler))


def loaded(sampler, make):
    """Returns a sampler of equal parameters, in the present order of groups."""
    saved = sampler.state_dict()
    new = make([nn.Parameter(p.detach().clone()) for p in params_of(sampler)])
    new.load_state_dict(saved)
    return new


WAYS = {
    "loaded": loaded,
    "copied": lambda sampler, _: copy.deepcopy(sampler),
    "pickled": lambda sampler, _: pickle.loads(pickle.dumps(sampler)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_the_copy_continues_the_chain(case, way):
    make, change = CASES[case]
    sampler = make(make_params())
    run(sampler, range(7))
    change(sampler)
    other = WAYS[way](sampler, make)
    assert run(other, range(7, 15)) == run(sampler, range(7, 15))


def test_a_skipped_step_does_not_date_a_noise_estimate():
    ends = []
    for has_failed in (False, True):
        sampler = sg.SGHMC(make_params(), lr=0.1, nonfinite="skip", **SHARED)
        run(sampler, range(2))
        set_all(sampler, noise_estimate=0.08)
        if has_failed:
            for p in params_of(sampler):
                p.grad = torch.full_like(p, torch.nan)
            sampler.step()
        set_all(sampler, lr=0.025)
        ends.append(run(sampler, range(2, 4)))
    assert ends[0] == ends[1]


def test_a_shallow_copy_leaves_the_original_usable():
    sampler = groups_of(make_params())
    run(sampler, range(2))
    copy.copy(sampler)
    run(sampler, range(2, 4))


def test_a_later_group_follows_a_shared_lr():
    sampler = sg.MCLMC(make_params(), lr=0.1, **SHARED)
    schedule = sg.PolynomialDecay(sampler, 3.0)
    for step in range(4):
        if step == 2:
            sampler.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        run(sampler, [step])
        schedule.step()
    assert len({group["lr"] for group in sampler.param_groups}) == 1


def test_a_resumed_monitor_observes_the_same_steps():
    """``resample_momentum_every`` has changed since its last observation."""
    found = []
    for is_resumed in (False, True):
        sampler = sg.SGHMC(make_params(), lr=0.1, **SHARED)
        monitor = sg.TemperatureMonitor(sampler, every=20)
        run(sampler, range(25))
        set_all(sampler, resample_momentum_every=3)
        if is_resumed:
            saved = monitor.state_dict()
            monitor.detach()
            monitor = sg.TemperatureMonitor(sampler, every=7)
            monitor.load_state_dict(saved)
        run(sampler, range(25, 90))
        found.append((monitor.num_observed, monitor.all().kinetic.mean))
    assert found[0] == found[1]
    monitor.detach()
    before = bits(monitor.state_dict())
    with pytest.raises(RuntimeError):
        monitor.load_state_dict(saved)
    assert bits(monitor.state_dict()) == before
    with pytest.raises(ValueError, match="previous_gradients lacks gradients"):
        monitor.load_state_dict({**saved, "previous_gradients": {"step": 1}})


@pytest.mark.parametrize("change", [{"losses": "x"}, {"count": "x"}, {"monitor": {}}])
def test_a_refused_checkpoint_cuts_no_store(tmp_path, change):
    sampler = sg.SGLD(make_params(), lr=0.1, **SHARED)
    monitor = sg.TemperatureMonitor(sampler, every=2)
    named = dict(zip("ab", params_of(sampler), strict=True))
    collector = sg.Collector(sampler, named, tmp_path, monitor=monitor)
    run(sampler, range(5))
    saved = collector.state_dict()
    run(sampler, range(5, 9))
    collector.flush()
    with pytest.raises((TypeError, ValueError)):
        collector.load_state_dict({**saved, **change})
    assert collector.num_draws == 9 and monitor.num_observed > 2
