"""Errors of SBPS: the exact message, and nothing changed."""

import pytest
import torch
from failed_steps import assert_unchanged, refused, snapshot, step_fails
from sbps_chains import Draws, make, run, two
from short_chains import assert_same
from torch import nn

NO_CLOSURE = """\
SBPS.step() needs a closure, which returns the losses of the examples:

    def closure():
        x, y = draw_minibatch()  # a fresh one at each call, independent of all others
        return F.cross_entropy(model(x), y, reduction="none")

    sampler.step(closure)"""


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("num_data", 0, "must be finite and > 0"),
        ("prior_precision", -1.0, "must be finite and >= 0"),
        ("temperature", 0, "must be finite and > 0"),
        ("num_std", -0.5, "must be finite and >= 0"),
        ("num_std", float("nan"), "must be finite and >= 0"),
        ("observation_decay", -1.0, "must be finite and >= 0"),
        ("refresh_rate", float("inf"), "must be finite and >= 0"),
        ("decay", 1.0, "must be in [0, 1)"),
        ("eps", 0, "must be finite and > 0"),
        ("sample_interval", 0.0, "must be finite and > 0"),
    ],
)
def test_hyperparameters_out_of_range(name, value, wanted):
    message = f"Invalid {name}: {value} ({wanted})"
    with refused(ValueError, message):
        make(two(), **{name: value})
    sampler = make(two())
    for group in sampler.param_groups:
        group[name] = value
    step_fails(sampler, Draws(sampler._all_params()), ValueError, message)


@pytest.mark.parametrize(
    "name", ["preconditioned", "adapt", "adapt_every_step", "replacement"]
)
def test_switches_are_bools(name):
    with refused(TypeError, f"Invalid {name}: 1 (must be a bool)"):
        make(two(), **{name: 1})


def test_what_a_group_cannot_have_alone():
    p, q = two()
    sampler = make([{"params": [p]}, {"params": [q], "prior_precision": 1.0}])
    sampler.param_groups[1]["temperature"] = 2.0
    message = (
        "Invalid temperature: [1.0, 2.0] in the param groups (must be equal: there is "
        "one particle for all)"
    )
    step_fails(sampler, Draws([p, q]), ValueError, message)


def test_models_that_are_none():
    params = two()
    with refused(
        TypeError,
        "Invalid model: of type builtin_function_or_method (must be a torch.nn.Module "
        "or None)",
    ):
        make(params, model=len)
    with refused(
        ValueError,
        "Invalid model: 2 of the 2 parameters of SBPS are not parameters of it",
    ):
        make(params, model=nn.Linear(2, 2))


def with_backward(params):
    losses = Draws(params)()
    losses.sum().backward(retain_graph=True)
    return losses


def with_nan(params):
    return Draws(params)() + torch.tensor([float("nan"), float("inf")] + 8 * [0.0])


def with_infinite_slope(params):
    return Draws(params)() + (0 * params[0].sum()).sqrt()


BAD_CLOSURES = {
    "no tensor": (
        lambda p: 3.0,
        TypeError,
        "SBPS got a float from the closure (must return the losses of the examples, a "
        "Tensor of shape [n])",
    ),
    "backward": (
        with_backward,
        RuntimeError,
        "SBPS found gradients after the closure: it must return the losses of the "
        "examples and not call backward()",
    ),
    "reduced": (
        lambda p: Draws(p)().mean(),
        RuntimeError,
        "SBPS got losses of shape [] from the closure (must be the examples' losses, "
        "of shape [n]: use reduction='none')",
    ),
    "a matrix": (
        lambda p: Draws(p)()[:, None],
        RuntimeError,
        "SBPS got losses of shape [10, 1] from the closure (must be the "
        "examples' losses, of shape [n])",
    ),
    "one": (
        lambda p: Draws(p, 1)(),
        RuntimeError,
        "SBPS got the loss of 1 example from the closure (must be of 2 at least, to "
        "estimate the noise of a minibatch)",
    ),
    "too many": (
        lambda p: torch.cat([Draws(p, 50)(), Draws(p, 1)()]),
        RuntimeError,
        "SBPS got the losses of 51 examples from the closure, and num_data = 50 (must "
        "not be more; if examples are drawn with replacement, set replacement=True)",
    ),
    "complex": (
        lambda p: Draws(p)().to(torch.complex64),
        RuntimeError,
        "SBPS got complex losses from the closure (must be real numbers)",
    ),
    "not finite": (
        with_nan,
        RuntimeError,
        "SBPS got 2 of 10 losses from the closure that are not finite",
    ),
    "slopes not finite": (
        with_infinite_slope,
        RuntimeError,
        "SBPS got losses from the closure whose derivatives are not finite",
    ),
    "no graph": (
        lambda p: Draws(p)().detach(),
        RuntimeError,
        "SBPS got losses from the closure that do not depend on its parameters (were "
        "they computed under torch.no_grad()?)",
    ),
    "others' graph": (
        lambda p: Draws(two())(),
        RuntimeError,
        "SBPS got losses from the closure that do not depend on its parameters (were "
        "they computed under torch.no_grad()?)",
    ),
}


@pytest.mark.parametrize("bad", BAD_CLOSURES)
@pytest.mark.parametrize("done", [0, 7])
def test_closures_that_are_wrong(bad, done):
    closure, kind, message = BAD_CLOSURES[bad]
    params, others = two(), two()
    sampler, twin = make(params), make(others)
    good, same = Draws(params), Draws(others)
    run(sampler, good, done)
    run(twin, same, done)
    step_fails(sampler, lambda: closure(params), kind, message)
    assert all(p.grad is None for p in params)
    # And the chain goes on as if nothing had been.
    run(sampler, good, 5)
    run(twin, same, 5)
    assert_same(params, others)


def test_exceptions_of_hooks_change_nothing():
    params, others = two(), two()
    samplers = [make(p, sample_interval=0.01) for p in (params, others)]
    for p, sampler in zip((params, others), samplers, strict=True):
        run(sampler, Draws(p), 6)
    sampler, twin = samplers

    def broken(*_):
        raise KeyError("data")

    handle = sampler.register_sample_hook(broken)
    with pytest.raises(KeyError, match="data"):
        for _ in range(20):
            before = snapshot(sampler)
            sampler.step(Draws(params))
            twin.step(Draws(others))
    assert_unchanged(sampler, before)
    handle.remove()
    sampler.step(Draws(params))
    twin.step(Draws(others))
    assert_same(params, others)


def test_a_step_without_closure_shows_how_to_write_one():
    step_fails(make(two()), None, TypeError, NO_CLOSURE)


def test_nothing_to_move():
    p = nn.Parameter(torch.zeros(3), requires_grad=False)
    message = "SBPS has no parameter that requires gradients"
    step_fails(make([p]), lambda: p, RuntimeError, message)


def test_samples_need_an_interval():
    with refused(
        ValueError,
        "Invalid sample_interval: None (must be a trajectory time, for there to be "
        "samples)",
    ):
        make(two()).register_sample_hook(lambda sampler, time: None)


def test_state_dicts_with_a_broken_clock():
    sampler = make(two())
    state = sampler.state_dict()
    for group in state["param_groups"]:
        group["clock"] = [0.0] * 5
    with refused(
        ValueError,
        "Invalid clock: it has 5 numbers (must be 7, and 3 for each of at most 32 "
        "observations)",
    ):
        sampler.load_state_dict(state)
