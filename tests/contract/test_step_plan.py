"""Steps that are made like the last one: what changes between two is seen."""

import copy
import gc
import weakref
from collections import UserDict, defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from reference import same_bits
from short_chains import assert_same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torch_sgmcmc as sg
from torch_sgmcmc.core import distributed, step_plan
from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.core.ops import fused_step_

# That go by gradients alone; EWSG has more tests in test_ewsg_plan.py.
KINDS = ("SGLD", "SGLRW", "SGHMC", "BAOA", "SGNHT")


def make(kind, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n).to(dtype)) for n in (5, 3)]
    common = {"lr": 0.1, "num_data": 10, "prior_precision": 0.5, "seed": 4}
    return getattr(sg, kind)(params, **{**common, **settings}), params


def step(sampler, params, times=1):
    for _ in range(times):
        if isinstance(sampler, sg.EWSG):
            sampler.step(partial(minibatch, sampler, params))
            continue
        for p in params:
            p.grad = p.detach() ** 3
        sampler.step()


def minibatch(sampler, params):
    """Gradients of the minibatch that EWSG asks for."""
    for p in params:
        p.grad = p.detach() ** 3 + sampler.minibatches.sin().to(p.dtype)


def has_plan(sampler):
    return context_of(sampler).plan is not None


def whole(sampler, params, times=1):
    """Steps none of which is made like the last one."""
    for _ in range(times):
        context_of(sampler).plan = None
        step(sampler, params)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in (*KINDS, "EWSG")),
        *(("SGHMC", dtype) for dtype in (torch.float64, torch.bfloat16)),
    ],
)
def test_cached_steps_equal_uncached_ones(kind, dtype):
    one, other = make(kind, dtype), make(kind, dtype)
    step(*one, 5)
    whole(*other, 5)
    assert has_plan(one[0])
    assert_same(one[1], other[1])
    assert one[0].param_groups[0]["step"] == 5


def prior_mean_of_state(sampler, params):
    for p in params:
        sampler.state[p]["prior_mean"] = torch.full_like(p.detach(), 2.0)


def other_momenta(sampler, params):
    for p in params:
        if "momentum" in sampler.state[p]:
            sampler.state[p]["momentum"] = torch.ones_like(p.detach())


def other_dicts(sampler, params):
    for p in params:
        sampler.state[p] = {k: v * 0.5 for k, v in sampler.state[p].items()}


def other_state(sampler, params):
    halves = {p: {k: v * 0.5 for k, v in d.items()} for p, d in sampler.state.items()}
    sampler.state = defaultdict(dict, halves)


def loaded(sampler, params):
    state = copy.deepcopy(sampler.state_dict())
    state["param_groups"][0]["lr"] = 0.01
    sampler.load_state_dict(state)


def more_parameters(sampler, params):
    params.append(nn.Parameter(torch.ones(2)))
    sampler.add_param_group({"params": params[-1:]})


def replaced_parameter(sampler, params):
    params[1] = sampler.param_groups[0]["params"][1] = nn.Parameter(torch.ones(3))


def longer(sampler, params):
    params[1].data = torch.ones(4)
    for name, value in sampler.state[params[1]].items():
        if isinstance(value, Tensor) and value.numel() == 3:
            sampler.state[params[1]][name] = torch.ones(4)
    sampler.reassign_noise_offsets()


def double(sampler, params):
    for p in params:
        p.data = p.data.double()
        p.grad = None
        for name, value in sampler.state[p].items():
            if isinstance(value, Tensor):
                sampler.state[p][name] = value.double()


def moved_state(sampler, params):
    """The same dicts and tensors, of other parameters."""
    for p, other in zip(params, params[::-1], strict=True):
        p.data = torch.ones(3)
        p.grad = None
        for key, value in sampler.state[p].items():
            sampler.state[p][key] = value if key == "step" else value[:3]
        assert other is not p
    sampler.reassign_noise_offsets()
    step(sampler, params)
    kept = [sampler.state.pop(p) for p in params]
    for p, state in zip(params, kept[::-1], strict=True):
        sampler.state[p] = state


class OwnDict(dict):
    """A mapping that is no dict to C."""


def own_state(sampler, params):
    for p in params:
        sampler.state[p] = UserDict(sampler.state[p])


def set_in_group(**changes):
    return lambda sampler, params: sampler.param_groups[0].update(changes)


def replace_group(make_dict, **changes):
    def replace(sampler, params):
        sampler.param_groups[0] = make_dict({**sampler.param_groups[0], **changes})

    return replace


CHANGES = {
    "lower lr": set_in_group(lr=0.05),
    "lr of NumPy": set_in_group(lr=np.float32(0.1)),  # 0.1 in float32 alone
    "lr of float32": set_in_group(lr=torch.tensor(0.1)),
    "other prior": set_in_group(prior_precision=2.0, prior_mean=1.0),
    "replaced dict": replace_group(dict, temperature=0.5),
    "own dict": replace_group(OwnDict),
    "no state": lambda sampler, params: sampler.state.clear(),
    "frozen": lambda sampler, params: params[1].requires_grad_(False),
    **{
        change.__name__: change
        for change in (
            moved_state,
            own_state,
            prior_mean_of_state,
            other_momenta,
            other_dicts,
            other_state,
            loaded,
            more_parameters,
            longer,
            replaced_parameter,
            double,
        )
    },
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "EWSG"])
def test_changes_between_two_steps_take_effect(kind, change):
    one, other = make(kind), make(kind)
    # One after the other: who has lost the turn makes a whole step.
    for (sampler, params), go_on in ((one, step), (other, whole)):
        step(sampler, params, 3)
        CHANGES[change](sampler, params)
        go_on(sampler, params, 3)
    assert_same(one[1], other[1])


def set_data(index, tensor):
    return lambda sampler, params: setattr(params[index], "data", tensor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_in_group(lr=-1.0), r"Invalid lr: -1"),
        (set_in_group(nonfinite="no"), r"Invalid nonfinite"),
        (lambda s, ps: s.param_groups[0]["params"].pop(), r"parameters"),
        (set_in_group(mommentum=1.0), r"mommentum"),
        (set_data(1, torch.ones(7)), r"reassign_noise_offsets"),
        # As many bytes, and other elements.
        (set_data(0, torch.ones(10).half()), r"reassign_noise_offsets"),
        (set_in_group(lr=np.array([0.1])), r"Invalid lr"),
        (set_in_group(momentum=np.array(0.9)), r"momentum"),
    ],
)
def test_what_is_refused_is_refused(change, words):
    sampler, params = make("SGHMC")
    step(sampler, params, 2)
    before = params[0].detach().clone()
    change(sampler, params)
    with pytest.raises((ValueError, RuntimeError, TypeError), match=words):
        step(sampler, params)
    assert params[0].numel() == 10 or same_bits(params[0].detach(), before)
    assert sampler.param_groups[0]["step"] == 2


def test_other_elements_in_as_many_bytes_are_seen():
    """SGLD has no state that would not fit them."""
    sampler, params = make("SGLD", torch.float64)
    step(sampler, params, 2)
    params[0].data = torch.ones(10)
    with pytest.raises(RuntimeError, match="reassign_noise_offsets"):
        step(sampler, params)
    assert sampler.param_groups[0]["step"] == 2


def test_an_update_that_fails_is_not_counted():
    """Here the result cannot be copied to a parameter that is not contiguous."""
    p = nn.Parameter(torch.ones(3, 2).t())
    sampler = sg.SGLD([p], 0.1, num_data=10, seed=0)
    step(sampler, [p], 2)
    p.grad = torch.ones_like(p)

    def copy(to, source, non_blocking=False):
        if to.data_ptr() == p.data_ptr():
            raise RuntimeError("no copy")
        to.numpy()[...] = source.numpy()
        return to

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("copy_", copy, "CPU")
        with pytest.raises(RuntimeError, match=r"no copy|copy_"):
            sampler.step()
    assert sampler.param_groups[0]["step"] == 2
    sampler.step()
    assert sampler.param_groups[0]["step"] == 3


@pytest.mark.parametrize("kind", ["SGHMC", "EWSG"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 77),
        ("step", torch.tensor(2)),
        ("num_skipped", 0),
        ("offsets", [0, 128]),
        ("sizes", [5, 3]),
        ("next_offset", 0),
        ("sampler", "SGLD"),
        ("momentum_settings", [1.0, 1.0, 10.0]),
    ],
)
def test_what_the_sampler_owns_is_not_replaced(kind, key, value):
    sampler, params = make(kind)
    step(sampler, params, 2)
    before = params[0].detach().clone()
    former = sampler.param_groups[0][key]
    sampler.param_groups[0][key] = value
    with pytest.raises(RuntimeError, match=f"Invalid param group 0: '{key}' was"):
        step(sampler, params)
    assert same_bits(params[0].detach(), before)
    assert sampler.state_dict()["param_groups"][0]["step"] == 2
    sampler.param_groups[0][key] = former
    step(sampler, params)
    assert sampler.param_groups[0]["step"] == 3


def test_lists_of_a_state_dict_are_copies():
    sampler, params = make("SGHMC", noise_estimate=0.01)
    step(sampler, params, 2)
    saved = sampler.state_dict()["param_groups"][0]
    for value in saved.values():
        if isinstance(value, list):
            value.append(3)
        if isinstance(value, Tensor):
            value += 1
    assert sampler.param_groups[0]["step"] == 2
    step(sampler, params)
    assert sampler.param_groups[0]["offsets"] == [0, 128]


def test_missing_gradients_and_hooks_take_effect():
    sampler, params = make("SGLD")
    step(sampler, params, 2)
    seen = []
    sampler.register_step_post_hook(lambda *_: seen.append(1))
    params[0].grad = torch.zeros(5)
    params[1].grad = None
    before = params[1].detach().clone()
    sampler.step()
    assert seen == [1] and same_bits(params[1].detach(), before)


def test_gradients_and_former_state_are_free():
    """A step keeps nothing that its user has dropped."""
    sampler, params = make("SGHMC")
    step(sampler, params)
    gradient = weakref.ref(params[0].grad)
    momentum = weakref.ref(sampler.state[params[0]]["momentum"])
    sampler.zero_grad()
    gc.collect()
    assert gradient() is None
    sampler.load_state_dict(copy.deepcopy(sampler.state_dict()))
    gc.collect()
    assert momentum() is None


@pytest.mark.parametrize("estimate", ["online", 0.01])
def test_noise_estimates_use_plans(estimate):
    """Estimates from gradients are updated at each step."""
    one, other = (make("SGHMC", noise_estimate=estimate, lr=0.01) for _ in "ab")
    step(*one, 110)
    whole(*other, 110)
    assert has_plan(one[0]) == (estimate != "online")
    assert_same(one[1], other[1])


def test_an_estimate_of_noise_that_is_asked_for_later_begins():
    sampler, params = make("SGHMC", lr=0.01)
    step(sampler, params, 2)
    assert has_plan(sampler)
    sampler.param_groups[0]["noise_estimate"] = "online"
    step(sampler, params)
    assert not has_plan(sampler)
    assert all(sampler.state[p]["num_grads"] == 1 for p in params)


@pytest.mark.parametrize("method", ["step", "_run_step", "_launch"])
def test_what_a_subclass_does_is_done_at_each_step(method):
    calls = []

    class Own(sg.SGLD):
        pass

    def own(self, *args):
        calls.append(1)
        return getattr(sg.SGLD, method)(self, *args)

    setattr(Own, method, own)
    params = [nn.Parameter(torch.ones(3))]
    step(Own(params, 0.1, num_data=10, seed=0), params, 4)
    assert len(calls) == 4


def loss_of(params, loss):
    assert torch.is_grad_enabled()
    for p in params:
        p.grad = p.detach() ** 3
    return loss


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC"])
def test_closures_and_monitors_use_plans(kind):
    chains, readings = [], []
    for each_whole in (False, True):
        sampler, params = make(kind)
        monitor = sg.TemperatureMonitor(sampler, every=1)
        losses = []
        for i in range(6):
            if each_whole:
                context_of(sampler).plan = None
            losses.append(sampler.step(partial(loss_of, params, i * 1.5)))
        assert losses == [i * 1.5 for i in range(6)]
        assert has_plan(sampler)
        chains.append(params)
        readings.append(monitor.state_dict())
    assert_same(*chains)
    assert str(readings[0]) == str(readings[1])


def test_temperatures_see_no_gradient_that_is_not_finite():
    sampler, params = make("SGLD", nonfinite="skip")
    monitor = sg.TemperatureMonitor(sampler, every=1)
    step(sampler, params, 3)
    before = str(monitor.state_dict())
    params[0].grad = torch.full_like(params[0], torch.nan)
    sampler.step()
    assert str(monitor.state_dict()) == before
    assert sampler.num_skipped == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_what_torch_keeps_of_its_own(enabled):
    """Versions of parameters, which autograd compares, and whether it is on."""
    sampler, params = make("SGHMC")
    step(sampler, params, 2)
    assert has_plan(sampler)
    versions = [p._version for p in params]
    with torch.set_grad_enabled(enabled):
        sampler.step()
        assert torch.is_grad_enabled() == enabled
    assert all(p._version > v for p, v in zip(params, versions, strict=True))


def test_hooks_of_all_optimizers_and_profilers_see_each_step():
    sampler, params = make("SGLD")
    step(sampler, params, 2)
    with torch.profiler.profile() as profile:
        step(sampler, params, 2)
    names = [event.key for event in profile.key_averages() if event.count == 2]
    assert any("SGLD.step" in name for name in names)
    seen = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    try:
        step(sampler, params, 2)
    finally:
        handle.remove()
    assert len(seen) == 2


def test_a_sampler_with_the_same_seed_warns():
    one, other = make("SGLD"), make("SGHMC")
    step(*one, 3)
    with pytest.warns(sg.SharedNoiseWarning):
        step(*other, 2)
        step(*one, 2)


def test_a_parameter_that_knows_its_sampler_does_not_keep_it():
    """The garbage collector sees what a step was made of."""
    sampler, params = make("SGHMC")
    for p in params:
        p.owner = sampler
    step(sampler, params, 3)
    assert has_plan(sampler)
    gone = weakref.ref(sampler), weakref.ref(params[0])
    del sampler, params, p
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_reading_state_makes_no_step(lr):
    """torch calls step() to have some, which SGLD has none of."""
    model = nn.Linear(2, 1)
    sampler = sg.SGLD(model.parameters(), lr, num_data=10, seed=0)
    for _ in range(3):
        model(torch.ones(3, 2)).sum().backward()
        sampler.step()
    assert has_plan(sampler) == (lr > 0)
    sampler.zero_grad()
    get_optimizer_state_dict(model, sampler)
    assert sampler.param_groups[0]["step"] == (3 if lr > 0 else 0)


def step_on_one_rank(sampler, params, folder):
    where = {"init_method": f"file://{folder}/ranks", "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **where)
    try:
        step(sampler, params, 3)
    finally:
        torch.distributed.destroy_process_group()


def test_later_ranks_take_effect(tmp_path, monkeypatch):
    sampler, params = make("SGLD")
    step(sampler, params, 3)
    assert has_plan(sampler)
    settled = []
    monkeypatch.setattr(distributed, "settle", lambda c: not settled.append(c))
    monkeypatch.setattr(distributed, "world_size", lambda *_: 2)
    step_on_one_rank(sampler, params, tmp_path)
    assert settled == [context_of(sampler)]


def test_one_rank_uses_plans(tmp_path, monkeypatch):
    sampler, params = make("SGLD")
    step(sampler, params, 2)
    made = []

    def counted(*given):
        made.append(int(given[-1]))
        return fused_step_(*given)

    monkeypatch.setattr(step_plan, "fused_step_", counted)
    step_on_one_rank(sampler, params, tmp_path)
    assert made == [2, 3, 4]


def test_a_later_parameter_is_sampled():
    """Once it has been absent, and again after steps like each other."""
    sampler, params = make("SGLD")
    for i in range(8):
        for p in params:
            p.grad = p.detach() ** 3
        if i in (0, 5):
            params[1].grad = None
        if i == 6:
            with pytest.warns(UserWarning, match="in 2 of 7 steps"):
                sampler.step()
        else:
            sampler.step()
        assert has_plan(sampler) == (i not in (0, 5))
