"""The preconditioner that users give SBPS; test_loading_errors.py has bad ones."""

import copy

import pytest
import torch
from failed_steps import refused
from sbps_chains import Draws, make, run, two, uneven
from short_chains import assert_same, kept_state, make_params


def given(params, **settings):
    return make(params, preconditioned=True, given=uneven, **settings)


def places(sampler, params, steps=150):
    return run(sampler, Draws(params), steps)


def test_a_given_preconditioner_is_copied():
    params = make_params(torch.bfloat16)
    tensors = [uneven(p).requires_grad_() for p in params]
    sampler = make(params, preconditioned=True)
    sampler.set_preconditioner(tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
    for p in params:
        kept = sampler.state[p]["preconditioner"]
        assert kept.dtype == torch.float32 and not kept.requires_grad
        assert torch.equal(kept, uneven(p))
    places(sampler, params)
    assert sampler.diagnostics.bounces > 5
    for p in params:
        state = sampler.state[p]
        kept = {"origin", "velocity", "preconditioner", "direction"}
        assert state.keys() - {"step"} == kept
        assert torch.equal(state["preconditioner"], uneven(p))
        assert torch.equal(state["direction"], uneven(p) * state["velocity"])


def test_numbers_broadcast():
    params = two()
    sampler = make(params, preconditioned=True)
    sampler.set_preconditioner([2, torch.tensor([0.5, 3.0])])
    kept = [sampler.state[p]["preconditioner"].tolist() for p in params]
    assert kept == [[2.0] * 3, [[0.5, 3.0]] * 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_twice_the_preconditioner_is_half_the_time(dtype):
    """The paths equal a chain's without preconditioner, bitwise."""
    params, others = two(dtype), two(dtype)
    times, expected = places(make(params), params)
    sampler = make(others, preconditioned=True, given=lambda _: 2.0)
    halves, found = places(sampler, others)
    assert sampler.diagnostics.bounces > 5
    assert halves == [time / 2 for time in times]
    assert_same(found, expected)


def test_it_is_the_learned_one_that_is_frozen():
    """A chain without V continues, bitwise, as if A had been set."""
    params = two()
    closure = Draws(params)
    sampler = make(params, preconditioned=True, decay=0.8, eps=0.1, adapt=False)
    run(sampler, closure, 1)
    for p, square in zip(params, (0.3, 2.0), strict=True):
        sampler.state[p]["square_average"].fill_(square)
    run(sampler, closure, 60)
    state = copy.deepcopy(sampler.state_dict())
    for kept in state["state"].values():
        assert len(set(kept["preconditioner"].flatten().tolist())) == 1
        del kept["square_average"]
    for group in state["param_groups"]:
        group["adapt"] = True  # which there is nothing of
    others = [p.detach().clone().requires_grad_() for p in params]
    twin = make(others)
    twin.load_state_dict(state)
    same = Draws(others)
    same.generator.set_state(closure.generator.get_state())
    bounces = sampler.diagnostics.bounces
    run(sampler, closure, 100)
    run(twin, same, 100)
    assert twin.diagnostics.bounces > bounces + 3
    assert_same(params, others)


def test_another_one_begins_a_line_where_the_particle_is():
    params = two()
    closure = Draws(params)
    sampler = make(params, preconditioned=True, decay=0.8)
    run(sampler, closure, 30)
    saved = sampler.state_dict()["state"][0]
    before = dict(saved)
    looks = sampler.param_groups[0]["num_observations"]
    for value in ([0.5, 2.0], None, None):
        here = [p.detach().clone() for p in params]
        sampler.set_preconditioner(value)
        run(sampler, closure, 1)
        assert_same([p.detach() for p in params], here)
        looks += 1
        assert sampler.param_groups[0]["num_observations"] == looks
        velocity = [sampler.state[p]["velocity"].flatten() for p in params]
        assert torch.cat(velocity).norm() == pytest.approx(1)
        for p, a in zip(params, value or [1.0, 1.0], strict=True):
            state = sampler.state[p]
            # Without one A is learned from the beginning.
            assert ("square_average" in state) == (value is None)
            assert (state["preconditioner"] == a).all()
        run(sampler, closure, 20)
        looks = sampler.param_groups[0]["num_observations"]
        if value is None:
            break
    # What was saved is what it was.
    assert saved.keys() == before.keys()
    assert all(saved[key] is before[key] for key in before)


def test_none_where_there_is_none_changes_nothing():
    params, others = two(), two()
    sampler, twin = (make(q, preconditioned=True, decay=0.8) for q in (params, others))
    closures = Draws(params), Draws(others)
    for chain, closure in zip((sampler, twin), closures, strict=True):
        run(chain, closure, 30)
    sampler.set_preconditioner(None)
    for chain, closure in zip((sampler, twin), closures, strict=True):
        run(chain, closure, 30)
    assert_same(params, others)


def test_it_is_loaded_before_the_first_step():
    params, others = two(), two()
    sampler, twin = given(params), make(others, preconditioned=True)
    twin.load_state_dict(copy.deepcopy(sampler.state_dict()))
    assert_same(places(twin, others)[1], places(sampler, params)[1])
    # And by one that has another.
    thirds = two()
    third = make(thirds, preconditioned=True, given=lambda _: 3.0)
    third.load_state_dict(given(two()).state_dict())
    places(third, thirds)
    assert_same(params, thirds)


def test_parameters_that_stand_still_keep_theirs():
    params = two()
    params[1].requires_grad_(False)
    sampler = given(params)
    closure = Draws(params)
    run(sampler, closure, 10)
    assert sampler.state[params[1]].keys() - {"step"} == {"preconditioner"}
    params[1].requires_grad_(True)
    run(sampler, closure, 10)
    for p in params:
        state = sampler.state[p]
        assert torch.equal(state["direction"], uneven(p) * state["velocity"])
    for group in sampler.param_groups:
        group["preconditioned"] = False
    run(sampler, closure, 10)
    assert "direction" not in sampler.state[params[0]]
    for group in sampler.param_groups:
        group["preconditioned"] = True
    run(sampler, closure, 10)
    for p in params:
        assert torch.equal(sampler.state[p]["preconditioner"], uneven(p).double())


@pytest.mark.parametrize("steps", [0, 10])
def test_a_group_added_later_needs_one(steps):
    p, q = two()
    sampler = given([p])
    run(sampler, Draws([p]), steps)
    sampler.add_param_group({"params": [q]})
    here = p.detach().clone()
    with refused(
        RuntimeError,
        "SBPS has no preconditioner for a parameter of shape [2, 2], but has others: "
        "call set_preconditioner() for all",
    ):
        sampler.step(Draws([p, q]))
    assert torch.equal(p, here) and (q == 1).all()
    sampler.set_preconditioner([1.0, 2.0])
    run(sampler, Draws([p, q]), 10)
    assert (q != 1).all()


def test_only_where_there_is_preconditioning():
    sampler = make(two())
    for value in ([1.0, 1.0], None):
        with refused(
            ValueError,
            "Invalid preconditioned: False (must be True to set a preconditioner)",
        ):
            sampler.set_preconditioner(value)
    blank = [v for kept in kept_state(sampler).values() for v in kept.values()]
    assert not any(v.any() for v in blank)
