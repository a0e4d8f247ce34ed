"""Derivatives of single data's outputs by all parameters, by backward passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["jacobians"]

# Data whose outputs are differentiated in one batch of backward passes. Each pass goes
# through all of them, so that more cost more arithmetic, and fewer more calls.
_TOGETHER = 8


def jacobians(
    function: Callable[[Tensor], Tensor], params: list[Tensor], indices: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of data, and their derivatives by the parameters as they are.

    Args:
        function: gives the outputs [M, ...] of data with indices [M], with a graph.
        params: the parameters, d elements in all.
        indices: [M], M >= 1.

    Returns:
        The outputs without a graph, and the Jacobians [M, C, d], C being the number of
        outputs of a datum.
    """
    values, rows = [], []
    for part in indices.split(_TOGETHER):
        with torch.enable_grad():
            outputs = function(part)
        count = outputs.numel()
        basis = torch.eye(count, dtype=outputs.dtype, device=outputs.device)
        grads = torch.autograd.grad(
            outputs,
            params,
            basis.view(count, *outputs.shape),
            is_grads_batched=True,
            allow_unused=True,
        )
        flat = [
            p.new_zeros(count, p.numel()) if g is None else g.reshape(count, -1)
            for p, g in zip(params, grads, strict=True)
        ]
        values.append(outputs.detach())
        rows.append(torch.cat(flat, 1).view(len(part), count // len(part), -1))
    return torch.cat(values), torch.cat(rows)
