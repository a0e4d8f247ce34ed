"""Log-likelihoods of some data, with a graph of their gradients.

With weights w, one for each datum, s(w) = Σ wᵢ ∇ℓᵢ is a backward pass; it is linear in
w, so that differentiating it by w gives all gradients ∇ℓᵢ, and doing the same to a
directional derivative gives all Hᵢ z.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from torch_sgmcmc.chain.checks import wrong_shape
from torch_sgmcmc.chain.jacobians import bases, jacobian

__all__ = [
    "Closure",
    "LikelihoodGraph",
    "columns_of_linear",
    "flat",
    "flat_gradient",
    "log_likelihoods",
    "weighted_sum",
]

Closure = Callable[[Tensor], Tensor]

# Data from which on single backward passes are quicker than a batch of them, in which
# the products of matrices with vectors become slow batches of products of matrices.
_SINGLY = 1024


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements in one row."""
    return torch.cat([t.reshape(-1) for t in tensors])


class LikelihoodGraph:
    """Derivatives of log-likelihoods [M], which have a graph, by the parameters."""

    def __init__(self, values: Tensor, params: list[Tensor]) -> None:
        self.values, self.params = values, params
        self.weights = torch.ones_like(values).requires_grad_()
        self.slope = flat_gradient(values, params, self.weights)

    def gradients(self) -> Tensor:
        """∇ℓᵢ: [M, d]."""
        return columns_of_linear(self.slope, self.weights).t().contiguous()

    def hessian(self) -> Tensor:
        """Σ Hᵢ: [d, d]."""
        width = len(self.slope) + len(self.values)
        return jacobian(self.slope, self.params, width)

    def hessian_products(self, z: Tensor) -> Tensor:
        """Hᵢ z: [M, d]."""
        pull, weights = self._bent(z)
        if pull is None:
            return self.values.new_zeros(len(self.values), len(z))
        return columns_of_linear(pull, weights).t().contiguous()

    def along(self, z: Tensor) -> Tensor:
        """The derivatives in the direction z, ∇ℓᵢᵀz, with a graph: [M]."""
        return torch.autograd.grad(
            self.slope, self.weights, z.to(self.slope.dtype), create_graph=True
        )[0]

    def _bent(self, z: Tensor) -> tuple[Tensor | None, Tensor]:
        """Σ wᵢ Hᵢ z as a function of weights (None if it is 0), and the weights."""
        along = self.along(z)
        weights = torch.ones_like(along).requires_grad_()
        if not along.requires_grad:  # ℓ is linear
            return None, weights
        pull = flat_gradient(along, self.params, weights)
        return (pull if pull.requires_grad else None), weights


def log_likelihoods(closure: Closure, indices: Tensor) -> Tensor:
    """Calls the closure and checks what it returns."""
    values = closure(indices)
    if not isinstance(values, Tensor):
        raise TypeError(
            "Invalid log-likelihoods: the closure returned "
            f"{type(values).__name__} (must be a tensor, of one for each index)"
        )
    if values.shape != indices.shape:
        wanted = f"{list(indices.shape)}, one for each index"
        raise wrong_shape("log-likelihoods", values, wanted)
    if torch.is_grad_enabled() and not values.requires_grad:
        raise RuntimeError(
            "HMCECS got log-likelihoods from the closure that do not depend on the "
            "parameters, or have no graph"
        )
    return values


def weighted_sum(values: Tensor, params: list[Tensor], weights: Tensor) -> Tensor:
    """Σ wᵢ ∇ℓᵢ, in float64: [d]."""
    grads = torch.autograd.grad(
        values,
        params,
        weights.to(values.dtype),
        allow_unused=True,
        materialize_grads=True,
    )
    row = grads[0].reshape(-1) if len(grads) == 1 else flat(grads)
    return row.double().contiguous()  # a single gradient may be an expanded one


def flat_gradient(outputs: Tensor, params: list[Tensor], weights: Tensor) -> Tensor:
    """The gradient of the weighted outputs by all parameters, [d], with a graph."""
    with torch.enable_grad():
        return flat(
            torch.autograd.grad(
                outputs,
                params,
                weights,
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        )


def columns_of_linear(pull: Tensor, weights: Tensor) -> Tensor:
    """The derivative of ``pull`` [d], which has a graph, by its M weights: [d, M]."""
    d, size = len(pull), weights.numel()
    out = pull.new_empty(d, size)
    begin = 0
    for basis in bases(d, pull, d + size):
        end = begin + len(basis)
        if size < _SINGLY:
            (rows,) = torch.autograd.grad(
                pull, weights, basis, retain_graph=True, is_grads_batched=True
            )
            out[begin:end] = rows.reshape(-1, size)
        else:
            for direction, row in zip(basis, out[begin:end], strict=True):
                (part,) = torch.autograd.grad(
                    pull, weights, direction, retain_graph=True
                )
                row.copy_(part.reshape(size))
        begin = end
    return out
