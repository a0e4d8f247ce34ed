"""Rows of linear functions are read off their graphs, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from torch_sgmcmc.ecs.linear_rows import read_rows

F64 = torch.float64
Function = Callable[[Tensor, list[Tensor]], Tensor]

#: Functions of a matrix [M, 3] and parameters, and the parameters' shapes.
READ: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "vector": (lambda x, p: x @ p[0], [(3,)]),
    "column": (lambda x, p: x @ p[0], [(3, 1)]),
    "column, squeezed": (lambda x, p: (x @ p[0]).squeeze(), [(3, 1)]),
    "column, selected": (lambda x, p: (x @ p[0])[:, 0] + p[1], [(3, 1), ()]),
    "column of a vector": (lambda x, p: (x @ p[0][:, None]).flatten(), [(3,)]),
    "layer": (lambda x, p: F.linear(x, p[0], p[1]).squeeze(-1), [(1, 3), (1,)]),
    "layer without bias": (lambda x, p: F.linear(x, p[0]).view(-1), [(1, 3)]),
    "bias": (lambda x, p: p[1] + x @ p[0], [(3,), ()]),
    "bias first": (lambda x, p: x @ p[1] + p[0], [(1,), (3,)]),
    "two matrices": (lambda x, p: x @ p[0] + x.cos() @ p[1], [(3,), (3,)]),
    "offset": (lambda x, p: 0.5 + (x @ p[0] + x[:, 0]), [(3,)]),
    "unused": (lambda x, p: x @ p[1], [(2, 2), (3,)]),
    "transposed matrix": (lambda x, p: x.t().contiguous().t() @ p[0], [(3,)]),
    "column of the matrix": (lambda x, p: x[:, :1] @ p[0], [(1,)]),
}
REFUSED: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "sum of products": (lambda x, p: (x * p[0]).sum(1), [(3,)]),
    "scaled": (lambda x, p: 2 * (x @ p[0]), [(3,)]),
    "scaled parameters": (lambda x, p: x @ (2 * p[0]), [(3,)]),
    "difference": (lambda x, p: x @ p[0] - p[1], [(3,), ()]),
    "multiple": (lambda x, p: torch.add(x @ p[0], p[1], alpha=2), [(3,), ()]),
    "scaled layer": (
        lambda x, p: torch.addmm(p[1], x, p[0], beta=3, alpha=1),
        [(3, 1), (1,)],
    ),
    "layer of scaled inputs": (
        lambda x, p: torch.addmm(p[1], x, p[0], beta=1, alpha=3),
        [(3, 1), (1,)],
    ),
    "the same twice": (lambda x, p: x @ p[0] + x.cos() @ p[0], [(3,)]),
    "a number for each": (lambda x, p: x @ p[0] + p[1], [(3,), (7,)]),
    "a matrix of parameters": (lambda x, p: p[0] @ x[0], [(7, 3)]),
    "a quadratic form": (lambda x, p: (x * p[0].sum()) @ p[0], [(3,)]),
    "one of two outputs": (lambda x, p: (x @ p[0])[:, 1], [(3, 2)]),
    "turned parameters": (lambda x, p: x @ p[0].t().reshape(4)[:3], [(2, 2)]),
    "a bent one": (lambda x, p: (x @ p[0]).exp(), [(3,)]),
    "sparse matrix": (lambda x, p: torch.mv(x.to_sparse(), p[0]), [(3,)]),
}


def read(
    function: Function, shapes: list[tuple[int, ...]], dtype: torch.dtype = F64
) -> tuple[Tensor | None, Tensor]:
    """The rows that are read, and those that there are."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(7, 3, generator=g, dtype=dtype)
    params = [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]
    outputs = function(x, params)
    rows = [
        torch.autograd.functional.jacobian(
            lambda v, i=i: function(x, [*params[:i], v, *params[i + 1 :]]), p
        ).reshape(7, -1)
        for i, p in enumerate(params)
    ]
    return read_rows(get_gradient_edge(outputs), params, 7), torch.cat(rows, 1)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("name", READ)
def test_rows(name: str, dtype: torch.dtype) -> None:
    rows, truth = read(*READ[name], dtype)
    assert rows is not None
    assert torch.equal(rows, truth)
    assert rows.dtype == dtype
    assert not rows.requires_grad


@pytest.mark.parametrize("name", REFUSED)
def test_functions_whose_rows_are_not_read(name: str) -> None:
    rows, _ = read(*REFUSED[name])
    assert rows is None


def test_other_numbers_of_outputs_are_refused() -> None:
    weight = torch.ones(3, requires_grad=True)
    edge = get_gradient_edge(torch.ones(7, 3) @ weight)
    assert read_rows(edge, [weight], 6) is None


def test_elements_in_another_order_are_refused() -> None:
    weight = torch.randn(2, 2).t().requires_grad_()  # whose transpose is contiguous
    edge = get_gradient_edge(torch.randn(7, 4) @ weight.t().view(4))
    assert read_rows(edge, [weight], 7) is None


def test_one_parameter_takes_no_copy() -> None:
    x, weight = torch.ones(7, 3), torch.ones(3, requires_grad=True)
    rows = read_rows(get_gradient_edge(x @ weight), [weight], 7)
    assert rows is not None
    assert rows.data_ptr() == x.data_ptr()
