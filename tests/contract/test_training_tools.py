"""Schedulers, profilers and gradient scalers work on samplers."""

import copy

import pytest
import torch
from every_sampler import Chain, bits
from failed_steps import refused
from reference import same_bits
from short_chains import assert_same, make, make_params, one_parameter, take_step
from short_chains import set_grads as set_gradients
from torch import nn
from torch.optim import lr_scheduler as schedulers

import torch_sgmcmc as sg

EACH = pytest.mark.parametrize("kind", ["SGLD", "SGHMC"])


CYCLE = {"step_size_up": 3, "cycle_momentum": False}
ON_LR = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, gamma=0.5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=7),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda i: (1 + i) ** -0.55),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, 10, cycle_momentum=False),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, **CYCLE),
}
MOMENTA = {"base_momentum": 0.7, "max_momentum": 0.95}
ON_MOMENTUM = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, 10, **MOMENTA),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, step_size_up=3, **MOMENTA),
}
CASES = [
    (kind, name, schedule)
    for kind, table in (("SGLD", ON_LR), ("SGHMC", ON_MOMENTUM), ("EWSG", ON_MOMENTUM))
    for name, schedule in table.items()
]


@pytest.mark.parametrize(
    ("kind", "name", "schedule"), CASES, ids=[f"{k}-{n}" for k, n, _ in CASES]
)
def test_schedulers(kind, name, schedule):
    # The sampler goes through SGD's values, and they enter the chain: it is the one
    # with the same numbers written into the groups by hand.
    params, others, by_sgd = make_params(), make_params(), make_params()
    sampler, by_hand = make(kind, params), make(kind, others)
    momentum = sampler.param_groups[0].get("momentum", 0.0)
    sgd = torch.optim.SGD(by_sgd, lr=0.1, momentum=momentum)
    ours, theirs = schedule(sampler), schedule(sgd)
    keys = ("lr", "momentum") if momentum else ("lr",)
    seen = set()
    for step in range(8):
        values = {k: sgd.param_groups[0][k] for k in keys}
        assert {k: sampler.param_groups[0][k] for k in keys} == values
        seen.add(tuple(values.values()))
        by_hand.param_groups[0].update(values)
        take_step(sampler, params, step)
        take_step(by_hand, others, step)
        set_gradients(by_sgd, step)
        sgd.step()
        ours.step()
        theirs.step()
    assert_same(params, others)
    assert len(seen) > 3


@pytest.mark.parametrize("base", [sg.SGLD, sg.SGHMC])
def test_hooks_do_not_change_the_chain(base):
    """And subclasses keep them."""

    class Mine(base):
        pass

    p, q = one_parameter(), one_parameter()
    with_hook, without = (
        kind([each], 0.1, num_data=10, seed=0) for kind, each in ((Mine, p), (base, q))
    )
    calls = []
    with_hook.register_step_post_hook(lambda *_: calls.append(with_hook.seed))
    for _ in range(3):
        with_hook.step()
        without.step()
    assert same_bits(p, q) and calls == [0, 0, 0]


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "EWSG"])
def test_profiler_shows_the_step(kind):
    p, q = one_parameter(), one_parameter()
    sampler, other = make(kind, [p]), make(kind, [q])
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        take_step(sampler, [p], 0)
    take_step(other, [q], 0)
    names = {event.key for event in profile.key_averages()}
    name = type(sampler).__name__
    assert f"Optimizer.step#{name}.step" in names
    operator = "ewsg_step_" if kind == "EWSG" else "fused_step_"
    assert f"torch_sgmcmc::{operator}" in names
    assert same_bits(p, q)


@EACH
def test_grad_scaler_unscales_before_the_noise(kind):
    # Scales are powers of two, so unscaled gradients have the very same bits.
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    twin = copy.deepcopy(net)
    sampler, other = make(kind, net.parameters()), make(kind, twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    x = torch.linspace(-1, 1, 30).view(5, 6)
    for _ in range(5):
        sampler.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        scaler.step(sampler)
        scaler.update()
        other.zero_grad()
        twin(x).square().mean().backward()
        other.step()
    assert scaler.get_scale() == 2.0**14
    assert_same(list(net.parameters()), list(twin.parameters()))


@EACH
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_grad_scaler_skips_steps_that_overflow(kind, nonfinite):
    """It looks at the gradients itself: nothing is left out twice, or raised."""
    p, q = one_parameter(), one_parameter()
    sampler, other = make(kind, [p], nonfinite=nonfinite), make(kind, [q])
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for overflow in (False, True, True, False):
        before = p.detach().clone(), sampler.param_groups[0]["step"]
        scale = scaler.get_scale()
        grad = torch.linspace(0.5, 2, 5)
        p.grad = scale * grad
        if overflow:
            p.grad[3] = torch.inf
        scaler.scale(torch.zeros(()))  # as a loss would pass, before step()
        scaler.step(sampler)
        scaler.update()
        if overflow:
            assert same_bits(p, before[0])
            assert sampler.param_groups[0]["step"] == before[1]
            assert scaler.get_scale() == scale / 2
        else:
            q.grad = grad
            other.step()
    assert sampler.param_groups[0]["step"] == 2 and sampler.num_skipped == 0
    assert same_bits(p, q)


@pytest.mark.parametrize("kind", ["EWSG", "HMC", "SBPS", "HMCECS", "HMCECS signed"])
def test_grad_scaler_is_refused_where_closures_make_gradients(kind):
    chain = Chain(kind)
    before = bits([chain.params, chain.sampler.state_dict()])
    for closure in ((), (lambda *_: pytest.fail("it was called"),)):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        scaler.scale(torch.ones(()))
        name = type(chain.sampler).__name__
        text = (
            f"{name} cannot be used with GradScaler, which scales the gradients of the "
            "closure: use torch.autocast with bfloat16, which needs no scaler"
        )
        with refused(RuntimeError, text):
            scaler.step(chain.sampler, *closure)
    assert bits([chain.params, chain.sampler.state_dict()]) == before
    chain.run(range(2))  # no trace of it
    assert int(chain.sampler.param_groups[0]["step"]) == 2


@pytest.mark.parametrize("kind", ["SGHMC", "EWSG"])
def test_autocast(kind):
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    sampler = make(kind, net.parameters())

    def closure():
        sampler.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.randn(3, 6)).square().mean()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in net.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sampler.step(closure)
    for p, b in zip(net.parameters(), before, strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        assert sampler.state[p]["momentum"].dtype == torch.float32
        assert torch.isfinite(p).all() and not torch.equal(p, b)
