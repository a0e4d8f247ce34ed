"""Control variates of second order: Hessians, exact cases, what is refused.

What both orders share is in test_control_variates*.py.
"""

import copy
from typing import Any

import pytest
import torch
from control_variate_problems import Batch, Problem, assert_close, assert_same
from failed_steps import refused
from test_control_variates_errors import fails
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import torch_sgmcmc as sg

pytestmark = pytest.mark.full


def hessian_of(problem: Problem) -> Tensor:
    """Of the mean loss of all data, where the parameters are."""
    own = problem.params
    sizes, shapes = [p.numel() for p in own], [p.shape for p in own]

    def loss(row: Tensor) -> Tensor:
        parts = zip(row.split(sizes), shapes, strict=True)
        problem.params = [part.view(shape) for part, shape in parts]  # type: ignore[misc]
        result = problem.loss_fn((problem.x, problem.y))
        problem.params = own
        return result

    row = torch.cat([p.detach().flatten() for p in own])
    return torch.autograd.functional.hessian(loss, row)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_hessian_of_all_data(size: int) -> None:
    problem = Problem()
    estimator = sg.ControlVariates(problem.sampler, problem.loss_fn, order=2)
    estimator.set_anchor(problem.loader(size))
    assert_close([estimator.state_dict()["full_hessian"]], [hessian_of(problem)])
    first = sg.ControlVariates(problem.sampler, problem.loss_fn)
    first.set_anchor(problem.loader(size))
    for key in ("anchor", "full_grads"):
        assert_same(estimator.state_dict()[key], first.state_dict()[key])


def test_rows_of_the_hessian_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    want = Problem().estimator(order=2).state_dict()["full_hessian"]
    monkeypatch.setattr("torch_sgmcmc.chain.jacobians._MOST_ELEMENTS", 3 * 24 * 5)
    got = Problem().estimator(order=2).state_dict()["full_hessian"]
    assert_close([got], [want])


def test_the_hessian_is_kept_in_the_type_of_arithmetic() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        hessian = Problem(dtype=dtype).estimator(order=2).state_dict()["full_hessian"]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert hessian.dtype == wide
        tolerance = 20 * torch.finfo(dtype).eps
        want = hessian_of(Problem(dtype=dtype, count=7)).to(hessian.dtype)
        assert torch.allclose(hessian, want, rtol=tolerance, atol=tolerance)


class Regression(Problem):
    """Least squares, whose data have Hessians of their own."""

    def loss_fn(self, batch: Batch) -> Tensor:
        self.calls += 1
        w, b, _ = self.params
        x, y = batch
        return ((x @ w + b - y.sum(1, keepdim=True)) ** 2).sum(1).mean()


@pytest.mark.parametrize("indices", [[0], [3], [1, 4], list(range(7))])
def test_exact_where_losses_are_quadratic(indices: list[int]) -> None:
    for order in (1, 2):
        problem = Regression()
        estimator = problem.estimator(order=order)
        problem.move(5.0)
        estimator.backward(problem.batch(indices))
        own = problem.params
        x, y = problem.x, problem.y
        want = torch.autograd.grad(problem.loss_fn((x, y)), own[:2])
        got = problem.grads()
        assert own[2].grad is None
        exact = all(
            torch.allclose(g, w, rtol=1e-11, atol=1e-11)
            for g, w in zip(got, want, strict=True)
        )
        assert exact == (order == 2 or len(indices) == 7)


def test_losses_that_are_linear() -> None:
    theta = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    sampler = sg.SGLD([theta], 0.1, num_data=4)
    data = torch.arange(8.0, dtype=torch.float64).view(4, 2)
    estimator = sg.ControlVariates(sampler, lambda b: (b @ theta).mean(), order=2)
    estimator.set_anchor([data])
    assert not estimator.state_dict()["full_hessian"].any()
    with torch.no_grad():
        theta += 1
    estimator.backward(data[:1])
    assert theta.grad is not None and theta.grad.tolist() == [3.0, 4.0]


def test_types_that_are_mixed() -> None:
    g = torch.Generator().manual_seed(3)
    data = torch.randn(6, 2, generator=g, dtype=torch.float64)
    params = [
        nn.Parameter(torch.ones(2, dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    ]

    def loss_fn(batch: Tensor) -> Tensor:
        return torch.cosh(batch @ (params[0] + params[1])).mean()

    estimator = sg.ControlVariates(
        sg.SGLD(params, 0.1, num_data=6), loss_fn, order=2, progress=False
    )
    estimator.set_anchor([data])
    assert estimator.state_dict()["full_hessian"].dtype == torch.float64
    with torch.no_grad():
        for p in params:
            p += 1e-3
    estimator.backward(data[:1])
    want = torch.autograd.grad(loss_fn(data), params)
    for p, w in zip(params, want, strict=True):
        assert p.grad is not None and p.grad.dtype == p.dtype
        assert torch.allclose(p.grad, w, rtol=1e-4)


# ---- What is refused -------------------------------------------------------------


def test_too_many_parameters() -> None:
    theta = nn.Parameter(torch.zeros(11_586))
    sampler = torch.optim.SGD([theta])
    sg.ControlVariates(sampler, torch.sum)
    with refused(
        ValueError,
        "Invalid order: 2 (the Hessian of 11586 parameters takes 1.073883 GB, must "
        "be at most that of 11585: use order 1)",
    ):
        sg.ControlVariates(sampler, torch.sum, order=2)
    # Frozen ones do not count, until they are trained.
    theta.requires_grad_(False)
    other = nn.Parameter(torch.ones(2))
    sampler = torch.optim.SGD([theta, other])
    estimator = sg.ControlVariates(sampler, lambda b: other.sum(), order=2)
    theta.requires_grad_(True)
    with pytest.raises(ValueError, match="the Hessian of 11588 parameters takes"):
        estimator.set_anchor([torch.ones(1)])


def test_several_devices_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "meta")]
    with refused(
        ValueError, "Invalid order: 2 (must be 1 for parameters on several devices)"
    ):
        sg.ControlVariates(torch.optim.SGD(apart), torch.sum, order=2)
    problem = Problem()
    monkeypatch.setattr("torch_sgmcmc.control_variates.world_size", lambda group: 3)
    problem.estimator()
    with fails(
        problem,
        RuntimeError,
        "ControlVariates of order 2 cannot run in a process group of 3 ranks, which "
        "would each have a Hessian of their own: use order=1, or a process_group of "
        "one rank for a chain of its own",
    ):
        problem.estimator(order=2)


def test_states_of_another_order() -> None:
    problem = Problem()
    first, second = (problem.estimator(order=order) for order in (1, 2))
    good = copy.deepcopy(second.state_dict())
    for estimator, state, text in (
        (
            first,
            good,
            "Invalid state_dict: it is of order 2, expected 1",
        ),
        (
            second,
            first.state_dict(),
            "Invalid state_dict: it is of order 1, expected 2",
        ),
        (
            second,
            {**good, "full_hessian": torch.ones(23, 24)},
            "Invalid state_dict: full_hessian has shape [23, 24], expected [24, 24]",
        ),
        (
            second,
            {**good, "full_hessian": None},
            "Invalid state_dict: full_hessian is a NoneType (must be a Tensor)",
        ),
    ):
        with fails(problem, ValueError, text):
            estimator.load_state_dict(state)
        assert_same([second.state_dict()["full_hessian"]], [good["full_hessian"]])
    empty = sg.ControlVariates(problem.sampler, problem.loss_fn)
    second.load_state_dict(empty.state_dict())
    with pytest.raises(RuntimeError, match="no anchor yet"):
        second.backward(problem.batch([0]))


def test_a_hessian_that_is_not_finite() -> None:
    problem = Problem()
    estimator = problem.estimator(order=2)
    before = estimator.state_dict()
    smooth = problem.loss_fn
    with torch.no_grad():
        problem.params[1][0] = 0.0
    # At 0 with a slope and no curvature.
    estimator.loss_fn = lambda b: smooth(b) + problem.params[1].abs().pow(1.5).sum()
    with fails(
        problem,
        RuntimeError,
        "the full Hessian is not finite: there can be no anchor here",
    ):
        estimator.set_anchor(problem.loader())
    assert_same(estimator.state_dict()["anchor"], before["anchor"])
    sg.ControlVariates(problem.sampler, estimator.loss_fn).set_anchor(problem.loader())


class Once(torch.autograd.Function):
    """A sum that is differentiable once."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.square().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


def test_losses_that_are_differentiable_once() -> None:
    problem = Problem()
    estimator = problem.estimator(order=2)
    problem.move()
    smooth = problem.loss_fn
    estimator.loss_fn = lambda b: smooth(b) + Once.apply(problem.params[1]).square()
    with fails(
        problem,
        RuntimeError,
        "trying to differentiate twice a function that was marked with "
        "@once_differentiable",
    ):
        estimator.backward(problem.batch([0]))
