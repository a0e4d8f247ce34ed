"""The linear predictor of a model, found in the graph of its log-likelihoods.

In every regression the parameters enter a datum's likelihood through one number that
is linear in them, ℓᵢ = f(ηᵢ) with ηᵢ = xᵢᵀθ + const. Then ∇ℓᵢ = f'(ηᵢ) xᵢ and
Hᵢ = f''(ηᵢ) xᵢ xᵢᵀ: the derivatives of f cost one number a datum, and the rows xᵢ need
no pass through f.

Every path from the log-likelihoods to the parameters leads through the predictor: it
is the last such tensor before the parameters that has one element for each datum.
Whether it is linear is not seen here; :mod:`torch_sgmcmc.ecs.taylor` tests it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torch_sgmcmc.ecs.likelihood_graph import columns_of_linear, flat_gradient
from torch_sgmcmc.ecs.linear_rows import read_rows

__all__ = ["Predictor"]


@dataclass
class Predictor:
    """A predictor, the log-likelihoods' derivatives by it, and its by the parameters.

    In graphs with M data and as many parameters, its number of elements does not tell
    it from a function of the parameters: its place among the gates is given then.
    """

    gate: int  # its place
    first: Tensor  # [M], ∂ℓᵢ/∂ηᵢ
    second: Tensor  # [M], ∂²ℓᵢ/∂ηᵢ²
    rows: Tensor  # [M, d], xᵢ: not to be written to

    @classmethod
    def of(
        cls, values: Tensor, params: list[Tensor], gate: int | None = None
    ) -> Predictor | None:
        """That of log-likelihoods [M], which have a graph; None if there is none."""
        edges = _gates(values, params)
        if gate is None:
            gate = _last_of_size(values, edges)
        if gate is None or gate >= len(edges):
            return None
        edge = edges[gate]
        (first,) = torch.autograd.grad(
            values, [edge], torch.ones_like(values), create_graph=True
        )
        second = None
        if first.requires_grad:
            (second,) = torch.autograd.grad(
                first,
                [edge],
                torch.ones_like(first),
                retain_graph=True,
                allow_unused=True,
            )
        if second is None:  # ℓ is linear
            second = torch.zeros_like(first)
        first = first.detach()
        rows = read_rows(edge, params, len(values))
        if rows is None:
            cotangents = first.clone().requires_grad_()
            slope = flat_gradient(edge, params, cotangents)
            rows = columns_of_linear(slope, cotangents).t()
        return cls(gate, first.reshape(-1), second.reshape(-1), rows)


def _last_of_size(values: Tensor, edges: list[GradientEdge]) -> int | None:
    """The last gate with one element for each datum."""
    if not edges:
        return None
    firsts = torch.autograd.grad(
        values, edges, torch.ones_like(values), retain_graph=True
    )
    fitting = [i for i, g in enumerate(firsts) if g.numel() == values.numel()]
    return fitting[-1]


def _gates(values: Tensor, params: list[Tensor]) -> list[GradientEdge]:
    """What every path to the parameters leads through, from the values on."""
    leaves = {get_gradient_edge(p).node for p in params}
    root = values.grad_fn
    if root is None:  # the values are a parameter
        return []
    order = _leading_to(leaves, root)
    within = leaves.union(order)
    gates: list[GradientEdge] = []
    ahead = {(root, values.output_nr)}
    for node in order:
        here = {edge for edge in ahead if edge[0] is node}
        if len(ahead) == 1:
            gates += [GradientEdge(*edge) for edge in here]
        ahead -= here
        ahead |= {edge for edge in node.next_functions if edge[0] in within}
    return gates


def _leading_to(leaves: set[Node], root: Node) -> list[Node]:
    """Nodes on the paths from the root to leaves, each before those it leads to."""
    leads = dict.fromkeys(leaves, True)
    order = []
    pending = [root]
    while pending:
        node = pending[-1]
        below = [n for n, _ in node.next_functions if n is not None]
        unseen = [n for n in below if n not in leads]
        if node not in leads and unseen:
            pending += unseen
            continue
        pending.pop()
        if node not in leads:
            leads[node] = any(leads[n] for n in below)
            if leads[node]:
                order.append(node)
    return order[::-1]
