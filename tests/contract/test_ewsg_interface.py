"""EWSG's settings.

What it has of torch's interface is in test_torch_optimizer_cases.py,
test_optimizer_interface.py and test_training_tools.py.
"""

import torch
from ewsg_chains import GOOD, Draws
from failed_steps import refused, step_fails
from short_chains import (
    assert_same,
    two,
)
from torch import nn

import torch_sgmcmc as sg


def test_settings_out_of_range() -> None:
    for name, value, kind, message in (
        ("index_chain_length", -1, ValueError, "-1 (must be >= 0)"),
        ("index_chain_length", 1.0, TypeError, "1.0 (must be an int, got float)"),
        ("num_chains", 0, ValueError, "0 (must be >= 1)"),
        ("num_chains", "2", TypeError, "'2' (must be an int, got str)"),
    ):
        with refused(kind, f"Invalid {name}: {message}"):
            sg.EWSG(two(), **{**GOOD, name: value})


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
