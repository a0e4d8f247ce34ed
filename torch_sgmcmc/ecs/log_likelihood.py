"""Log-likelihoods that show the outputs of the model that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.checks import check_callable, wrong_shape

__all__ = ["LogLikelihood"]


class LogLikelihood:
    r"""Per-datum log-likelihoods :math:`\ell_k = L_k(f_k(\theta))`, in two parts.

    It is a closure for :class:`HMCECS` as any other, ``closure(indices)`` being
    ``log_likelihood(outputs(indices), indices)``.

    In a regression the output is one number, linear in the parameters:
    :math:`\eta_k = x_k^\top \theta + \text{const}`. With ``rows``, which says what
    :math:`x_k` is,

    .. math::
        \nabla \ell_k = L_k'(\eta_k)\, x_k, \quad
        \nabla^2 \ell_k = L_k''(\eta_k)\, x_k x_k^\top

    take no backward pass through the model.

    Args:
        outputs: ``outputs(indices)`` returns the model's outputs f for these data as a
            tensor with a graph, of shape [len(indices), ...], those of a datum being
            independent of the others.
        log_likelihood: ``log_likelihood(outputs, indices)`` returns the log-likelihoods
            [len(indices)]; twice differentiable by ``outputs``, and dependent on the
            parameters through ``outputs`` alone.
        rows: ``rows(indices)`` returns the matrix x [len(indices), d] of the data's
            predictors, ``outputs(indices)`` [len(indices)] being x θ + const: θ is the
            parameters, flattened, in their order. A choice of θ* compares it with the
            derivatives of ``outputs`` in a random direction, for 256 data. None is a
            model of any other kind. Default: None.

    Raises:
        TypeError: an argument is not callable, or outputs or rows are no tensor.
        ValueError: outputs or rows are not of the shape above, or rows are not the
            derivatives of outputs.

    Example:
        >>> regression = LogLikelihood(
        ...     lambda indices: x[indices] @ weight + bias,
        ...     lambda eta, indices: y[indices] * eta - F.softplus(eta),
        ...     rows=lambda indices: F.pad(x[indices], (0, 1), value=1.0),
        ... )
        >>> sampler = HMCECS([weight, bias], num_data=len(x), subsample_size=1000)
        >>> sampler.step(regression)
    """

    def __init__(
        self,
        outputs: Callable[[Tensor], Tensor],
        log_likelihood: Callable[[Tensor, Tensor], Any],
        rows: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        check_callable("outputs", outputs)
        check_callable("log_likelihood", log_likelihood)
        if rows is not None:
            check_callable("rows", rows)
        self._outputs, self._log_likelihood, self._rows = outputs, log_likelihood, rows

    def __call__(self, indices: Tensor) -> Any:
        """The log-likelihoods of the data with these indices."""
        return self.of_outputs(self.outputs(indices), indices)

    def outputs(self, indices: Tensor) -> Tensor:
        """The model's outputs for the data with these indices, [M, ...]."""
        result = self._outputs(indices)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"Invalid outputs: got {type(result).__name__} (must be a tensor)"
            )
        if result.dim() == 0 or len(result) != len(indices):
            wanted = f"[{len(indices)}, ...], one row for each index"
            raise wrong_shape("outputs", result, wanted)
        if torch.is_grad_enabled() and not result.requires_grad:
            raise RuntimeError(
                "LogLikelihood got outputs that do not depend on the parameters, or "
                "have no graph"
            )
        return result

    @property
    def has_rows(self) -> bool:
        """Whether the outputs are said to be linear predictors."""
        return self._rows is not None

    def rows(self, indices: Tensor, d: int) -> Tensor:
        """The rows of the linear predictors, [M, d]: not to be written to."""
        assert self._rows is not None
        result = self._rows(indices)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"Invalid rows: got {type(result).__name__} (must be a tensor)"
            )
        if result.shape != (len(indices), d):
            wanted = f"[{len(indices)}, {d}], one row for each index"
            raise wrong_shape("rows", result, wanted)
        return result.detach()

    def of_outputs(self, outputs: Tensor, indices: Tensor) -> Any:
        """The log-likelihoods of the data with these indices that have these outputs.

        Args:
            outputs: as :meth:`outputs` returns them.
            indices: of the data, [M].
        """
        return self._log_likelihood(outputs, indices)
