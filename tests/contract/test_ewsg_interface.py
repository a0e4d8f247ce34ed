"""EWSG's settings, and torch's optimizer interface."""

import pytest
import torch
from ewsg_chains import GOOD, Draws
from failed_steps import step_fails
from short_chains import (
    advance,
    assert_same,
    make,
    make_params,
    take_step,
    two,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

import torch_sgmcmc as sg

# ---- What belongs to the sampler and not to a group ------------------------------


def test_settings_of_the_sampler() -> None:
    for name, value, kind, message in (
        ("index_chain_length", -1, ValueError, "-1 (must be >= 0)"),
        ("index_chain_length", 1.0, TypeError, "1.0 (must be an int, got float)"),
        ("num_chains", 0, ValueError, "0 (must be >= 1)"),
        ("num_chains", "2", TypeError, "'2' (must be an int, got str)"),
    ):
        with pytest.raises(kind) as error:
            sg.EWSG(two(), **{**GOOD, name: value})
        assert str(error.value) == f"Invalid {name}: {message}"
        with pytest.raises(ValueError) as managed:
            sg.EWSG([{"params": two(), name: 1}], **GOOD)
        assert str(managed.value) == (
            f"Invalid param group: {name!r} is managed by EWSG and cannot be set for a "
            "group"
        )


def test_settings_that_differ_between_groups() -> None:
    params = two()
    sampler = sg.EWSG([{"params": [p]} for p in params], **GOOD)
    for name, values in (("index_chain_length", [3, 1]), ("num_chains", [1, None])):
        sampler.param_groups[0][name] = values[0]
        message = (
            f"Invalid {name}: {values} in the param groups (must be equal: there is "
            "one decision for all)"
        )
        step_fails(sampler, Draws(params), ValueError, message)
        sampler.param_groups[0][name] = values[1]
    # For all groups it may change, and a new group follows.
    for group in sampler.param_groups:
        group["index_chain_length"] = 2
    added = nn.Parameter(torch.ones(4))
    sampler.add_param_group({"params": [added]})
    closure = Draws([*params, added])
    sampler.step(closure)
    assert len(closure.losses) == 3


# ---- torch's optimizer interface -------------------------------------------------


def test_defaults() -> None:
    sampler = sg.EWSG([nn.Parameter(torch.ones(3))], 0.1, num_data=2, seed=-3)
    assert isinstance(sampler, torch.optim.Optimizer)
    assert sampler.param_groups[0] | {"params": None} == {
        "params": None,
        "lr": 0.1,
        "momentum": 0.9,
        "num_data": 2,
        "prior_precision": 0.0,
        "prior_mean": 0.0,
        "temperature": 1.0,
        "surrogate": "momentum",
        "index_chain_length": 1,
        "num_chains": None,
        "num_proposals": 0,
        "num_accepted": 0,
        "persistent_index_chain": False,
        "num_drawn": 0,
        "minibatches": [],
        "capturable": False,
        "nonfinite": "raise",
        "seed": -3,
        "step": 0,
        "num_skipped": 0,
        "offsets": [0],
        "sizes": [3],
        "next_offset": 128,
    }
    assert sampler.target_summary().startswith("EWSG samples p(θ)")


def test_hooks_run_once_a_step() -> None:
    params = two()
    sampler = sg.EWSG(params, **GOOD, index_chain_length=3)
    calls: list[str] = []
    handle = torch_optimizer.register_optimizer_step_post_hook(
        lambda *_: calls.append("global")
    )
    try:
        sampler.register_step_pre_hook(lambda *_: calls.append("pre"))
        sampler.register_step_post_hook(lambda *_: calls.append("post"))
        sampler.step(Draws(params))
    finally:
        handle.remove()
    assert calls == ["pre", "post", "global"]


def test_profiler_shows_the_step() -> None:
    params = two()
    sampler = sg.EWSG(params, **GOOD)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        sampler.step(Draws(params))
    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#EWSG.step" in names
    assert "torch_sgmcmc::ewsg_log_ratio" in names


def test_schedulers_enter_weights_and_update() -> None:
    params, others = make_params(), make_params()
    sampler, by_hand = make("EWSG", params), make("EWSG", others)
    scheduler = lr_scheduler.OneCycleLR(
        sampler, max_lr=0.2, total_steps=10, base_momentum=0.7, max_momentum=0.95
    )
    warmup = set()
    for step in range(8):
        for key in ("lr", "momentum"):
            by_hand.param_groups[0][key] = sampler.param_groups[0][key]
            warmup.add(sampler.param_groups[0][key])
        take_step(sampler, params, step)
        take_step(by_hand, others, step)
        scheduler.step()
    assert_same(params, others)
    assert len(warmup) == 16


def test_a_learning_rate_of_zero_is_no_special_case() -> None:
    params = two()
    sampler = sg.EWSG(params, **{**GOOD, "lr": 0.0})
    before = [p.detach().clone() for p in params]
    sampler.step(Draws(params))
    assert_same(params, before)


def test_step_under_torch_compile() -> None:
    params, others = two(), two()
    eager, compiled = sg.EWSG(params, **GOOD), sg.EWSG(others, **GOOD)
    first, second = Draws(params), Draws(others)
    torch._dynamo.reset()
    step = torch.compile(lambda: compiled.step(second), backend="aot_eager")
    for _ in range(3):
        eager.step(first)
        step()
        assert_same(others, params)
    torch._dynamo.reset()


def test_autocast_in_the_closure() -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    sampler = sg.EWSG(net.parameters(), **GOOD)

    def closure() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.randn(3, 6)).square().mean()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(3):
        sampler.step(closure)
    for p, b in zip(net.parameters(), before, strict=True):
        assert p.grad is not None and p.grad.dtype == torch.float32
        assert torch.isfinite(p).all() and not torch.equal(p, b)


def test_gamma_precision_works_with_it() -> None:
    params = make_params()
    sampler = make("EWSG", params)
    precision = sg.GammaPrecision(sampler)
    advance(sampler, params, range(2))
    (drawn,) = precision.step()
    assert sampler.param_groups[0]["prior_precision"] == drawn > 0
    advance(sampler, params, range(2, 4))
