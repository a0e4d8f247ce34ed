"""Steps of EWSG that are made like the last one."""

import pytest
import torch
from short_chains import assert_same
from test_step_plan import has_plan
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core.context import context_of


def ewsg(**settings):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n)) for n in (5, 3)]
    common = {"lr": 0.1, "num_data": 10, "prior_precision": 0.5, "seed": 4}
    sampler = sg.EWSG(params, **{**common, **settings})
    draws = torch.Generator().manual_seed(1)

    def closure():
        for p in params:
            p.grad = p.detach() ** 3 + torch.randn(p.shape, generator=draws)
        return 2.5

    return sampler, params, closure


@pytest.mark.parametrize("gauged", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.0},
        {"index_chain_length": 3},
        {"surrogate": "one", "prior_mean": 0.3},
        {"nonfinite": "ignore"},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_ewsg_plan_equals_uncached_steps(settings, gauged):
    ends = []
    for each_whole in (False, True):
        sampler, params, closure = ewsg(**settings)
        monitor = sg.TemperatureMonitor(sampler, every=1) if gauged else None
        for i in range(12):
            if each_whole:
                context_of(sampler).plan = None
            if i == 5:
                sampler.param_groups[0]["lr"] = 0.05
            if i == 8:
                for p in params:
                    sampler.state[p]["prior_mean"] = torch.ones_like(p.detach())
            assert sampler.step(closure) == 2.5
            assert has_plan(sampler)
        group = {k: v for k, v in sampler.param_groups[0].items() if k != "params"}
        ends.append((params, group, str(monitor and monitor.state_dict())))
    assert_same(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]
    assert 0 < ends[0][1]["num_accepted"] < ends[0][1]["num_proposals"]


def test_ewsg_sees_gradients_in_one_memory_and_of_other_parameters():
    sampler, params, closure = ewsg()
    for _ in range(3):
        sampler.step(closure)
    kept = [torch.ones_like(p) for p in params]

    def reuses():
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad

    with pytest.raises(RuntimeError, match="in the memory of"):
        sampler.step(reuses)
    sampler.step(closure)
    sampler.step(closure)
    calls = []

    def lacks():
        closure()
        calls.append(1)
        if len(calls) == 2:
            params[0].grad = None

    with pytest.raises(RuntimeError, match="other parameters"):
        sampler.step(lacks)


@pytest.mark.parametrize("call", [1, 2])
def test_ewsg_uses_gradients_that_its_closure_sets(call):
    ends = []
    for each_whole in (False, True):
        sampler, params, closure = ewsg()
        calls = []

        def sets(sampler=sampler, closure=closure, calls=calls):
            closure()
            calls.append(1)
            if len(calls) == 4 + call:  # of the third step
                sampler.param_groups[0]["lr"] = 0.05

        for _ in range(5):
            if each_whole:
                context_of(sampler).plan = None
            sampler.step(sets)
        ends.append(params)
    assert_same(*ends)


def test_ewsg_plan_raises_and_bumps_versions():
    sampler, params, closure = ewsg()
    for _ in range(3):
        sampler.step(closure)
    versions = [p._version for p in params]
    sampler.step(closure)
    assert all(p._version > v for p, v in zip(params, versions, strict=True))
    sampler.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="Invalid lr: -1"):
        sampler.step(lambda: pytest.fail("there is nothing to compute yet"))
    assert sampler.param_groups[0]["step"] == 4


@pytest.mark.parametrize("settings", [{"index_chain_length": 0}, {}])
def test_ewsg_without_proposals_checks_gradients(settings):
    sampler, params, closure = ewsg(**settings)
    sampler.step(closure)

    def broken():
        closure()
        params[1].grad[0] = torch.nan

    with pytest.raises(RuntimeError, match="1 NaN"):
        sampler.step(broken)
    assert sampler.param_groups[0]["step"] == 1
