"""Gradients with control variates of second order, which SGLD and SGHMC have there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SecondOrder"]


class SecondOrder:
    r"""Minibatch gradients with an expansion of second order around an anchor.

    With :math:`\delta = \theta - \theta^*`, gradients g and Hessians h of the
    minibatch's mean loss, and those of all data, G and H,

    .. math:: g(\theta) - [g(\theta^*) + h(\theta^*) \delta] + G(\theta^*) +
        H(\theta^*) \delta

    is unbiased, and exact where losses are quadratic (section 6.2).

    Args:
        theta: the parameter, one row [d].
        loss_fn: ``loss_fn(theta, batch)`` returns the mean loss of a batch.
    """

    def __init__(self, theta: Tensor, loss_fn: Callable[[Tensor, Any], Tensor]) -> None:
        self.theta, self.loss_fn = theta, loss_fn

    def set_anchor(self, batches: Iterable[tuple[Any, int]]) -> None:
        """Puts the anchor at θ; batches of all data come with their sizes."""
        d, count = self.theta.numel(), 0
        self.anchor = self.theta.detach().clone()
        self.gradient, self.hessian = (
            torch.zeros(d).double(),
            torch.zeros(d, d).double(),
        )
        for batch, size in batches:
            at = self.anchor.clone().requires_grad_()
            slope = self._gradient(at, batch, create_graph=True)
            rows = [torch.autograd.grad(s, at, retain_graph=True)[0] for s in slope]
            self.gradient += size * slope.detach()
            self.hessian += size * torch.stack(rows)
            count += size
        self.gradient /= count
        self.hessian /= count

    def backward(self, batch: Any) -> None:
        """Writes the gradient of a minibatch to ``theta.grad``."""
        delta = self.theta.detach() - self.anchor
        at = self.anchor.clone().requires_grad_()
        slope = self._gradient(at, batch, create_graph=True)
        (term,) = torch.autograd.grad(slope, at, delta)
        gradient = self._gradient(self.theta, batch)
        expanded = slope.detach() + term
        self.theta.grad = gradient - expanded + self.gradient + self.hessian @ delta

    def _gradient(self, at: Tensor, batch: Any, create_graph: bool = False) -> Tensor:
        loss = self.loss_fn(at, batch)
        return torch.autograd.grad(loss, at, create_graph=create_graph)[0]
