"""SBPS as an optimizer: pSBPS, what users change between steps, errors."""

import copy
import warnings

import pytest
import torch
from failed_steps import assert_unchanged, refused, snapshot, step_fails
from sbps_chains import Draws, N, make, run, segments, two
from short_chains import assert_same, kept_state, make_params
from torch import nn

import torch_sgmcmc as sg


def test_the_preconditioner_adapts_until_frozen():
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 10.0, 100.0])

    def closure():
        x = torch.randn(10, 3, generator=generator, dtype=torch.float64)
        return 0.5 * (scale * (p - x)).square().sum(dim=1)

    sampler = make([p], preconditioned=True, replacement=True, prior_precision=0.0)
    sampler.step(closure)
    state = sampler.state[p]
    assert state["preconditioner"].tolist() == [1.0] * 3
    run(sampler, closure, 1500)
    state = sampler.state[p]
    assert sampler.diagnostics.bounces > 50
    a = state["preconditioner"]
    assert a.mean() == pytest.approx(1, abs=1e-12)
    # Gradients have standard deviations of the squared scales.
    assert a[0] > 30 * a[1] > 900 * a[2]
    torch.testing.assert_close(state["direction"], a * state["velocity"])
    assert state["velocity"].norm() == pytest.approx(1, abs=1e-14)
    kept = {key: state[key].clone() for key in ("square_average", "preconditioner")}
    sampler.param_groups[0]["adapt"] = False
    bounces = sampler.diagnostics.bounces
    run(sampler, closure, 300)
    assert sampler.diagnostics.bounces > bounces
    for key, value in kept.items():
        torch.testing.assert_close(sampler.state[p][key], value, rtol=1e-15, atol=0)


def test_v_learns_from_every_minibatch_and_a_where_lines_end():
    params = two()
    settings = {"preconditioned": True, "decay": 0.8, "eps": 0.1, "refresh_rate": 2.0}
    sampler = make(params, adapt_every_step=True, **settings)
    closure = Draws(params)
    squares = [torch.zeros_like(p) for p in params]
    old = []
    lines = steps = 0
    for _ in range(150):
        drawn = closure.generator.get_state()
        before = sampler.diagnostics
        sampler.step(closure)
        closure.generator.set_state(drawn)
        grads = torch.autograd.grad(closure().mean(), params)
        for p, square, grad in zip(params, squares, grads, strict=True):
            square.lerp_((grad + 20.0 / N * p.detach()).square(), 0.2)
            found = sampler.state[p]["square_average"]
            torch.testing.assert_close(found, square, rtol=1e-10, atol=1e-14)
        now = [sampler.state[p]["preconditioner"] for p in params]
        after = sampler.diagnostics
        refreshed = after.refreshments > before.refreshments
        if after.bounces > before.bounces:
            # What a bounce learns is in its A; a refreshment looks at a minibatch
            # along the new line, and so has its A already.
            inverse = torch.cat([v.sqrt().flatten() + 0.1 for v in squares])
            mean = inverse.reciprocal().mean()
            for a, v in zip(now, squares, strict=True):
                torch.testing.assert_close(a, 1 / (v.sqrt() + 0.1) / mean)
            lines += 1
        elif old and not refreshed:
            assert_same(now, old)
            steps += 1
        old = [a.clone() for a in now]
    assert lines > 10 and steps > 50 and sampler.diagnostics.refreshments > 3
    for group in sampler.param_groups:
        group["adapt"] = False
    kept = [sampler.state[p]["square_average"].clone() for p in params]
    run(sampler, closure, 50)
    assert_same([sampler.state[p]["square_average"] for p in params], kept)


def test_a_parameter_changed_from_outside():
    params = two()
    sampler = make(params)
    closure = Draws(params)
    run(sampler, closure, 20)
    velocity = sampler.state[params[0]]["velocity"].clone()
    with torch.no_grad():
        params[0].add_(5.0)
        jumped = params[0].clone()
    looks = sampler.param_groups[0]["num_observations"]
    sampler.step(closure)  # observes there, with the same velocity
    assert torch.equal(params[0], jumped)
    assert sampler.param_groups[0]["num_observations"] == looks + 1
    assert torch.equal(sampler.state[params[0]]["velocity"], velocity)
    params[1].data = torch.full((2, 2), 7.0, dtype=torch.float64)
    sampler.step(closure)
    assert (params[1] == 7).all()


def test_a_parameter_changed_and_put_back():
    params, others = make_params(torch.bfloat16), make_params(torch.bfloat16)
    sampler, twin = make(params), make(others)
    for p, s in ((params, sampler), (others, twin)):
        run(s, Draws(p), 20)
    with torch.no_grad():
        for p in params:
            p.neg_()
            p.neg_()
    for p, s in ((params, sampler), (others, twin)):
        run(s, Draws(p), 20)
    assert_same(params, others)


def test_another_target_is_observed_afresh():
    params = two()
    sampler = make([{"params": [p]} for p in params])
    closure = Draws(params)
    run(sampler, closure, 20)
    precision = sg.GammaPrecision(sampler)
    precision.step()
    before = [p.detach().clone() for p in params]
    looks = sampler.param_groups[0]["num_observations"]
    state = closure.generator.get_state()
    sampler.step(closure)
    assert_same(before, [p.detach() for p in params])
    assert sampler.param_groups[0]["num_observations"] == looks + 1
    ((time, value, _),) = sampler.param_groups[0]["clock"].observations
    assert time == 0
    # G has the new priors in it: they alone differ from a twin's at the same place.
    others = [nn.Parameter(p.detach().clone()) for p in params]
    twin = make([{"params": [p]} for p in others])
    twin.load_state_dict(copy.deepcopy(sampler.state_dict()))
    for group, other in zip(twin.param_groups, sampler.param_groups, strict=True):
        group["prior_precision"] = other["prior_precision"] + 2.0
    same = Draws(others)
    same.generator.set_state(state)
    twin.step(same)
    ((_, other_value, _),) = twin.param_groups[0]["clock"].observations
    along = sum((p.detach() * sampler.state[p]["velocity"]).sum() for p in params)
    assert other_value - value == pytest.approx(2.0 * float(along), rel=1e-9)
    run(sampler, closure, 20)


def test_frozen_parameters_stand_still():
    params = two()
    sampler = make(params)
    closure = Draws(params)
    run(sampler, closure, 10)
    params[1].requires_grad_(False)
    kept = params[1].clone()
    run(sampler, closure, 10)
    assert torch.equal(params[1], kept)
    assert set(kept_state(sampler)) == {params[0]}
    assert sampler.state[params[0]]["velocity"].norm() == pytest.approx(1)
    params[1].requires_grad_(True)
    run(sampler, closure, 10)
    assert not torch.equal(params[1], kept)
    velocity = [sampler.state[p]["velocity"].flatten() for p in params]
    assert torch.cat(velocity).norm() == pytest.approx(1)


def test_a_group_added_later_moves_along():
    p, q = two()
    sampler = make([p])
    run(sampler, Draws([p]), 10)
    sampler.add_param_group({"params": [q], "prior_precision": 3.0})
    run(sampler, Draws([p, q]), 10)
    assert (q != 1).all()
    assert sampler.param_groups[1]["clock"] == sampler.param_groups[0]["clock"]


def test_diagnostics():
    params = two()
    sampler = make(params, refresh_rate=3.0)
    empty = sampler.diagnostics
    assert empty.bounces == 0 and empty.trajectory_time == 0
    assert empty.bounce_rate != empty.bounce_rate  # NaN
    times, places = run(sampler, Draws(params), 300)
    d = sampler.diagnostics
    group = sampler.param_groups[0]
    lengths = [(b - a).norm() for (_, a), (_, b) in segments(times, places)]
    assert d.trajectory_time == times[-1]
    assert float(sum(lengths)) == pytest.approx(times[-1], rel=1e-9)
    assert d.bounce_rate == d.bounces / times[-1]
    assert d.proposals_per_bounce == group["num_proposals"] / d.bounces > 1
    assert d.mean_segment_length == times[-1] / (d.bounces + d.refreshments)
    assert d.violation_rate == group["num_violations"] / group["num_proposals"]
    kinds = ("num_observations", "num_proposals", "num_refreshments")
    assert sum(group[kind] for kind in kinds) == 300
    assert min(d.bounces, d.refreshments) > 10


def test_many_violations_are_warned_of_once():
    params = two()
    sampler = make(params)
    draws, noise = Draws(params), torch.Generator().manual_seed(1)

    # Noise that all examples share: their spread says nothing of it.
    def closure():
        common = 30 * torch.randn((), generator=noise)
        return draws() + common * torch.stack([p.sum() for p in params]).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1250):
            sampler.step(closure)
    mine = [w for w in caught if "proposals of SBPS" in str(w.message)]
    assert len(mine) == 1 and mine[0].filename == __file__
    assert "0.1% are expected with num_std = 3" in str(mine[0].message)
    assert "use a larger num_std" in str(mine[0].message)


NO_CLOSURE = """\
SBPS.step() needs a closure, which returns the losses of the examples:

    def closure():
        x, y = draw_minibatch()  # a fresh one at each call, independent of all others
        return F.cross_entropy(model(x), y, reduction="none")

    sampler.step(closure)"""


def test_what_a_group_cannot_have_alone():
    p, q = two()
    sampler = make([{"params": [p]}, {"params": [q], "prior_precision": 1.0}])
    sampler.param_groups[1]["temperature"] = 2.0
    message = "[1.0, 2.0] in the param groups (must be equal: there is one particle for"
    message = f"Invalid temperature: {message} all)"
    step_fails(sampler, Draws([p, q]), ValueError, message)


def test_models_that_are_none():
    params = two()
    wrong = "Invalid model: of type builtin_function_or_method"
    with refused(TypeError, f"{wrong} (must be a torch.nn.Module or None)"):
        make(params, model=len)
    wrong = "Invalid model: 2 of the 2 parameters of SBPS are not parameters of it"
    with refused(ValueError, wrong):
        make(params, model=nn.Linear(2, 2))


def with_backward(params):
    losses = Draws(params)()
    losses.sum().backward(retain_graph=True)
    return losses


NO_GRAPH = (
    "got losses from the closure that do not depend on its parameters (were they "
    "computed under torch.no_grad()?)"
)
#: Wrong closures, and what is said of them after "SBPS ".
BAD_CLOSURES = {
    "no tensor": (lambda p: 3.0,
     "got a float from the closure (must return the losses of the examples, a "
     "Tensor of shape [n])"),
    "reduced": (lambda p: Draws(p)().mean(),
     "got losses of shape [] from the closure (must be the examples' losses, of "
     "shape [n]: use reduction='none')"),
    "a matrix": (lambda p: Draws(p)()[:, None],
     "got losses of shape [10, 1] from the closure (must be the examples' losses, "
     "of shape [n])"),
    "one": (lambda p: Draws(p, 1)(),
     "got the loss of 1 example from the closure (must be of 2 at least, to "
     "estimate the noise of a minibatch)"),
    "too many": (lambda p: torch.cat([Draws(p, 50)(), Draws(p, 1)()]),
     "got the losses of 51 examples from the closure, and num_data = 50 (must not "
     "be more; if examples are drawn with replacement, set replacement=True)"),
    "complex": (lambda p: Draws(p)().to(torch.complex64),
     "got complex losses from the closure (must be real numbers)"),
    "not finite": (lambda p:
     Draws(p)() + torch.tensor([torch.nan, torch.inf] + 8 * [0.0]),
     "got 2 of 10 losses from the closure that are not finite"),
    "slopes not finite": (lambda p: Draws(p)() + (0 * p[0].sum()).sqrt(),
     "got losses from the closure whose derivatives are not finite"),
    "no graph": (lambda p: Draws(p)().detach(), NO_GRAPH),
    "others' graph": (lambda p: Draws(two())(), NO_GRAPH),
    "backward": (with_backward,
     "found gradients after the closure: it must return the losses of the examples "
     "and not call backward()"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_CLOSURES)
@pytest.mark.parametrize("done", [0, 7])
def test_closures_that_are_wrong(bad, done):
    closure, message = BAD_CLOSURES[bad]
    kind = TypeError if bad == "no tensor" else RuntimeError
    params, others = two(), two()
    sampler, twin = make(params), make(others)
    good, same = Draws(params), Draws(others)
    run(sampler, good, done)
    run(twin, same, done)
    step_fails(sampler, lambda: closure(params), kind, f"SBPS {message}")
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
    wanted = "must be a trajectory time, for there to be samples"
    with refused(ValueError, f"Invalid sample_interval: None ({wanted})"):
        make(two()).register_sample_hook(lambda sampler, time: None)


def test_a_step_without_hooks_passes_any_number_of_samples():
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    free = {"prior_precision": 0.0, "refresh_rate": 0.0, "num_std": 0.0}
    sampler = make([p], sample_interval=1e-3, **free)
    for _ in range(3):  # the force is tiny
        sampler.step(lambda: 1e-12 * p.sum() + torch.zeros(10, dtype=torch.float64))
    group = sampler.param_groups[0]
    assert group["trajectory_time"] > 1e7
    assert group["num_samples"] == pytest.approx(1e3 * group["trajectory_time"])


def test_state_dicts_with_a_broken_clock():
    sampler = make(two())
    state = sampler.state_dict()
    for group in state["param_groups"]:
        group["clock"] = [0.0] * 5
    wanted = "must be 7, and 3 for each of at most 32 observations"
    with refused(ValueError, f"Invalid clock: it has 5 numbers ({wanted})"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_another_prior_mean_is_another_target(is_replaced):
    params = two()
    means = [torch.zeros_like(p) for p in params]
    sampler = make(params, prior_mean=means)
    closure = Draws(params)
    run(sampler, closure, 20)
    before = [p.detach().clone() for p in params]
    looks = sampler.param_groups[0]["num_observations"]
    state = sampler.state[params[0]]
    if is_replaced:
        state["prior_mean"] = torch.full_like(params[0], 3.0).detach()
    else:
        state["prior_mean"].fill_(3.0)
    sampler.step(closure)
    assert_same(before, [p.detach() for p in params])
    assert sampler.param_groups[0]["num_observations"] == looks + 1
    assert sampler._trajectory.parts[0].prior_means[0] is state["prior_mean"]


def test_a_newcomer_without_v_is_refused():
    params = two()
    params[1].requires_grad_(False)
    sampler = make(params, preconditioned=True)
    closure = Draws(params)
    run(sampler, closure, 30)
    sampler.param_groups[0]["adapt"] = False
    params[1].requires_grad_(True)
    words = (
        "SBPS has no squared gradients of a new parameter, whose preconditioner would "
        "be so large that the others hardly move (after parameters are added or "
        "unfrozen set adapt=True for some steps)"
    )
    with refused(RuntimeError, words):
        sampler.step(closure)
    sampler.param_groups[0]["adapt"] = True
    run(sampler, closure, 30)
