"""pSGLD with a preconditioner that stays: always that of the present V and eps."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from failed_steps import refused
from short_chains import assert_same

import torch_sgmcmc as sg


def make(seed=0):
    """Two groups of two parameters, of which one does not adapt, after some steps."""
    g = torch.Generator().manual_seed(seed)
    params = [torch.randn(n, generator=g).requires_grad_() for n in (3, 5, 2, 4)]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    sampler = sg.PSGLD(groups, 0.1, num_data=10, gamma=False, eps=0.1, seed=1)
    for _ in range(2):
        step(sampler)
    sampler.param_groups[0]["adapt"] = False
    step(sampler)
    return sampler


def params_of(sampler):
    return [p for group in sampler.param_groups for p in group["params"]]


def step(sampler):
    for p in params_of(sampler):
        p.grad = p.detach() * 0.3
    sampler.step()


def adapt_for_a_step(sampler):
    sampler.param_groups[0]["adapt"] = True
    step(sampler)
    sampler.param_groups[0]["adapt"] = False


def replace(sampler):
    state = sampler.state_dict()
    for theirs in state["state"].values():
        theirs["square_average"] = theirs["square_average"] + 1
    sampler.load_state_dict(state)


def add_in_place(sampler):
    sampler.state[params_of(sampler)[0]]["square_average"].add_(1)


def set_eps(sampler):
    sampler.param_groups[0]["eps"] = 0.7


@pytest.mark.parametrize(
    "change", [adapt_for_a_step, replace, add_in_place, set_eps, step]
)
def test_the_root_follows_v_and_eps(change):
    sampler = make()
    before = deepcopy(sampler.state_dict())
    change(sampler)
    if change is not step:
        v = "square_average"
        was, now = before["state"][0][v], sampler.state_dict()["state"][0][v]
        assert change is set_eps or not torch.equal(was, now)
    fresh = make()  # and with nothing of what was kept
    fresh.__dict__.pop("_roots")
    for p, q in zip(params_of(fresh), params_of(sampler), strict=True):
        p.data.copy_(q.data)
    fresh.load_state_dict(deepcopy(sampler.state_dict()))
    step(sampler)
    step(fresh)
    assert_same(params_of(fresh), params_of(sampler))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_same_on_every_processor(dtype):
    """Rounded as NumPy's, which is IEEE 754's; torch's roots are not everywhere."""
    p = torch.ones(1000, dtype=dtype, requires_grad=True)
    sampler = sg.PSGLD([p], lr=1e-30, num_data=1, adapt=False, eps=0.1, seed=0)
    p.grad = torch.linspace(0.1, 3, 1000, dtype=dtype)
    sampler.step()
    square = p.grad.numpy() ** 2
    eps = square.dtype.type(0.1)
    expected = 1 / np.sqrt(np.sqrt(square) + eps)
    assert sampler.__dict__["_roots"][p].value.numpy().tolist() == expected.tolist()


def test_it_is_made_once_and_not_saved():
    sampler = make()
    first = params_of(sampler)[0]
    kept = sampler.__dict__["_roots"]
    root = kept[first].value
    assert root.shape == first.shape and len(kept) == 2
    step(sampler)
    assert kept[first].value is root
    assert set(sampler.state_dict()["state"][0]) == {"square_average", "step"}
    adapt_for_a_step(sampler)
    assert not kept


def quadratic(p, curvature):
    """Hutchinson's estimate of a diagonal Hessian is exact."""
    return 0.5 * (curvature * p * p).sum()


def gamma_step(sampler, curvature):
    sampler.zero_grad()
    (p,) = params_of(sampler)
    graph = sampler.param_groups[0]["gamma"]
    quadratic(p, curvature).backward(create_graph=graph)
    sampler.step()
    sampler.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_v_and_its_sensitivity_begin_with_gradient_and_curvature(dtype):
    """Without a gradient V has the mean of the others: nothing moves, and J is 1."""
    theta = torch.tensor([0.0, 1.0, -2.0, 3.0, -1e-3], dtype=dtype)
    curvature = torch.tensor([2.0, 0.5, -1.0, 0.0, 4.0], dtype=dtype)
    p = theta.clone().requires_grad_()
    settings = {"num_data": 10, "temperature": 3.0, "decay": 0.75}
    sampler = sg.PSGLD([p], 1e-30, **settings, seed=1)
    gamma_step(sampler, curvature)
    state = sampler.state[p]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    h = curvature.to(wide)
    grad = (theta * curvature).to(wide)
    v = grad**2 + 0.3 * h.abs()
    assert v[3] == 0
    v[3] = v.mean()
    expected = 0.75 * v + 0.25 * grad**2
    close = {"rtol": 1e-6, "atol": 0}
    torch.testing.assert_close(state["square_average"], expected, **close)
    close = {"rtol": 1e-6, "atol": 1e-12}
    torch.testing.assert_close(state["sensitivity"], 2 * grad * h, **close)


def test_gamma_that_begins_later():
    """V may rest on one gradient: it gets the curvature's part, and W begins at 0."""
    p = torch.tensor([1e-6, 2.0]).requires_grad_()
    curvature = torch.tensor([1.0, 3.0])
    sampler = sg.PSGLD([p], 1e-30, num_data=10, decay=0.75, seed=1, gamma=False)
    gamma_step(sampler, curvature)
    v = sampler.state[p]["square_average"].clone()
    grad = p.detach() * curvature
    torch.testing.assert_close(v, grad**2)
    sampler.param_groups[0]["gamma"] = True
    gamma_step(sampler, curvature)
    state = sampler.state[p]
    expected = 0.75 * (v + 0.1 * curvature) + 0.25 * grad**2
    torch.testing.assert_close(state["square_average"], expected)
    torch.testing.assert_close(state["sensitivity"], 0.25 * 2 * grad * curvature)
    # While V goes on without it, W loses its meaning.
    sampler.param_groups[0]["gamma"] = False
    gamma_step(sampler, curvature)
    assert set(sampler.state[p]) == {"square_average", "step"}


def test_a_checkpoint_resumes_as_it_was():
    """V and W that are there, however small, are not begun anew."""
    p = torch.tensor([1.0, 2.0]).requires_grad_()
    sampler = sg.PSGLD([p], 1e-30, num_data=10, decay=0.75, seed=1)
    gamma_step(sampler, torch.ones(2))
    state = sampler.state_dict()
    state["state"][0]["square_average"] = torch.tensor([0.0, 1e-12])
    state["state"][0]["sensitivity"] = torch.tensor([0.0, 1e-9])
    sampler.load_state_dict(state)
    gamma_step(sampler, torch.ones(2))
    mine = sampler.state[p]
    torch.testing.assert_close(mine["square_average"], torch.tensor([0.25, 1.0]))
    torch.testing.assert_close(mine["sensitivity"], torch.tensor([0.5, 1.0]))


SCALED = (
    "PSGLD with Γ cannot be used with GradScaler, which scales the loss and so its "
    "curvature: use torch.autocast with bfloat16, which needs no scaler, or "
    "gamma=False and adapt=False after burn-in"
)


@pytest.mark.parametrize("unscaled", [False, True], ids=["", "unscaled"])
@pytest.mark.parametrize("overflow", [False, True], ids=["", "overflow"])
@pytest.mark.parametrize("where", ["all", "a group", "no gradient"])
def test_a_scaler_is_refused_with_gamma(where, overflow, unscaled):
    p, q = (torch.ones(3, requires_grad=True) for _ in range(2))
    groups = [{"params": [p]}, {"params": [q]}]
    if where != "all":
        groups[0]["gamma"] = False
    sampler = sg.PSGLD(groups, 0.1, num_data=10, seed=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loss = p.square().sum() + (0 if where == "no gradient" else q.square().sum())
    scaler.scale(loss).backward(create_graph=True)
    if overflow:
        with torch.no_grad():
            assert p.grad is not None
            p.grad[1] = torch.inf
    if unscaled:
        scaler.unscale_(sampler)
    with refused(RuntimeError, SCALED):
        scaler.step(sampler)
    assert p.tolist() == q.tolist() == [1.0] * 3
    assert not sampler.state and sampler.param_groups[0]["step"] == 0
    # There is no trace of it, and one that is switched off does nothing.
    off = torch.amp.GradScaler("cpu", enabled=False)
    for step in (sampler.step, lambda: off.step(sampler)):
        sampler.zero_grad()
        (p.square().sum() + q.square().sum()).backward(create_graph=True)
        step()
    assert sampler.param_groups[0]["step"] == 2
    sampler.zero_grad()


def test_a_scaler_is_welcome_once_v_stays():
    runs = []
    for scaled in (True, False):
        p = torch.linspace(1, 2, 5).requires_grad_()
        sampler = sg.PSGLD([p], 0.01, num_data=10, seed=1)
        gamma_step(sampler, torch.ones(5))
        sampler.param_groups[0]["adapt"] = False
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=scaled)
        for _ in range(3):
            sampler.zero_grad()
            scaler.scale(quadratic(p, torch.ones(5))).backward()
            scaler.step(sampler)
            scaler.update()
        runs.append(p.detach().clone())
    assert torch.equal(*runs)
