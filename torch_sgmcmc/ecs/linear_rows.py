"""The rows of a linear function of the parameters, read off its graph.

A product of a matrix with parameters keeps the matrix for its backward pass, and the
rows of the function are the matrix's. Without this they take one product with the
matrix for each parameter (``likelihood_graph.columns_of_linear``),
which costs several times what everything else does that is made of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["read_rows"]

# These leave the order of elements as it is, in tensors of one row or column.
_RESHAPES = {
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "TBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}

# Where a product keeps its matrix, and where the parameters come in.
_PRODUCTS = {
    "AddmmBackward0": ("_saved_mat1", 2),
    "MmBackward0": ("_saved_self", 1),
    "MvBackward0": ("_saved_self", 1),
}


def read_rows(edge: GradientEdge, params: list[Tensor], size: int) -> Tensor | None:
    """The derivatives of ``size`` outputs at ``edge`` by all parameters.

    The outputs must be what they seem: a shape that is not kept in the graph can
    deceive, so that the rows are to be tested.

    Returns:
        [size, d], which may be the matrix itself: it must not be written to. None if
        the function is more than a sum of products with matrices and of numbers.
    """
    parts = _Parts(params, size)
    terms: list[Node | None] = [edge.node]
    while terms:
        if not parts.take(terms.pop(), terms):
            return None
    rows = [
        p.new_zeros(size, p.numel()) if part is None else part
        for p, part in zip(params, parts.found, strict=True)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


class _Parts:
    """The rows by each parameter, as they are found."""

    def __init__(self, params: list[Tensor], size: int) -> None:
        self.params, self.size = params, size
        self.places = {get_gradient_edge(p).node: i for i, p in enumerate(params)}
        self.found: list[Tensor | None] = [None] * len(params)

    def take(self, node: Node | None, terms: list[Node | None]) -> bool:
        """Reads a term of the outputs, or adds its own to the terms; if it can."""
        if node is None:  # without parameters
            return True
        name = node.name()
        inputs = [below for below, _ in node.next_functions]
        if node in self.places:
            number = self.params[self.places[node]]
            return self._keep(node, number.new_ones(self.size, 1))
        if name == "AddBackward0" and node._saved_alpha == 1:  # type: ignore[attr-defined]
            terms += inputs
            return True
        if name in _RESHAPES:
            terms.append(inputs[0])
            return True
        if name not in _PRODUCTS:
            return False
        if name == "AddmmBackward0":
            if not node._saved_alpha == node._saved_beta == 1:  # type: ignore[attr-defined]
                return False
            terms.append(inputs[0])
        attribute, place = _PRODUCTS[name]
        if inputs[place - 1] is not None:  # the matrix depends on parameters too
            return False
        leaf = inputs[place]
        while leaf is not None and leaf.name() in _RESHAPES:
            leaf = leaf.next_functions[0][0]
        return self._keep(leaf, getattr(node, attribute))

    def _keep(self, leaf: Node | None, rows: Tensor) -> bool:
        """Takes the rows by one parameter, a row or column; whether they fit."""
        i = self.places.get(leaf)
        if i is None or self.found[i] is not None or rows.layout != torch.strided:
            return False
        shape = self.params[i].shape
        if max(shape, default=1) != shape.numel():
            return False
        if rows.shape != (self.size, shape.numel()):
            return False
        self.found[i] = rows.detach()
        return True
