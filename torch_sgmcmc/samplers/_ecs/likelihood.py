"""Closures of HMC-ECS: log-likelihoods of single data and their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.core import hyperparams
from torch_sgmcmc.core.parameters import by_lightning
from torch_sgmcmc.core.utils import Interrupts

Closure = Callable[[Tensor], Tensor]

# From this number of data on, single backward passes are faster than a batch of them,
# which turns matrix-vector products into slow batched matrix products.
_SINGLY = 1024

# Most elements of a batch of directions.
_MOST_ELEMENTS = 2**25

# Below this fraction of changed rows, unchanged rows are copied from the last call.
_FEW = 0.25


class PredictorLogLikelihood:
    r"""Per-datum log-likelihoods :math:`\ell_k = L_k(f_k(\theta))`, in two parts.

    A closure for :class:`HMCECS`: ``closure(indices)`` is
    ``log_likelihood(outputs(indices), indices)``.

    In a regression the output is one number, linear in the parameters: :math:`\eta_k =
    x_k^\top \theta + \text{const}`. With ``rows``, which returns :math:`x_k`,

    .. math::
        \nabla \ell_k = L_k'(\eta_k)\, x_k, \quad
        \nabla^2 \ell_k = L_k''(\eta_k)\, x_k x_k^\top

    need no backward pass through the model.

    Args:
        outputs: ``outputs(indices)`` returns the model's outputs f for these data as a
            tensor with a graph, of shape [len(indices), ...]. The outputs of a datum do
            not depend on other data.
        log_likelihood: ``log_likelihood(outputs, indices)`` returns the log-likelihoods
            [len(indices)]; twice differentiable by ``outputs``, and dependent on the
            parameters through ``outputs`` alone.
        rows: ``rows(indices)`` returns the matrix x [len(indices), d] of the data's
            predictors, with ``outputs(indices)`` [len(indices)] = x θ + const: θ is the
            parameters, flattened, in their order. A choice of θ* compares x with the
            derivatives of ``outputs`` in a random direction, for 256 data. None is for
            any other model. Default: None.

    Raises:
        TypeError: an argument is not callable, or outputs or rows are not a tensor.
        ValueError: outputs or rows have a wrong shape, or rows are not the
            derivatives of outputs.

    Example:
        >>> regression = PredictorLogLikelihood(
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
        hyperparams.check_function("outputs", outputs)
        hyperparams.check_function("log_likelihood", log_likelihood)
        if rows is not None:
            hyperparams.check_function("rows", rows)
        self._outputs, self._log_likelihood, self._rows = outputs, log_likelihood, rows

    def __call__(self, indices: Tensor) -> Any:
        """Returns the log-likelihoods of the data with these indices."""
        return self.of_outputs(self.outputs(indices), indices)

    def outputs(self, indices: Tensor) -> Tensor:
        """Returns the model's outputs for the data with these indices, [M, ...]."""
        result = self._outputs(indices)
        if not isinstance(result, Tensor):
            raise hyperparams.wrong_type("outputs", result, "a tensor")
        if result.dim() == 0 or len(result) != len(indices):
            wanted = f"[{len(indices)}, ...], one row for each index"
            raise hyperparams.wrong_shape("outputs", result, wanted)
        if torch.is_grad_enabled() and not result.requires_grad:
            raise RuntimeError(
                "PredictorLogLikelihood got outputs that do not depend on the "
                "parameters, or have no graph"
            )
        return result

    @property
    def has_rows(self) -> bool:
        """True if the outputs are linear predictors with known rows."""
        return self._rows is not None

    def rows(self, indices: Tensor, d: int) -> Tensor:
        """Returns the rows of the linear predictors, [M, d]; do not write to them."""
        assert self._rows is not None
        result = self._rows(indices)
        if not isinstance(result, Tensor):
            raise hyperparams.wrong_type("rows", result, "a tensor")
        if result.shape != (len(indices), d):
            wanted = f"[{len(indices)}, {d}], one row for each index"
            raise hyperparams.wrong_shape("rows", result, wanted)
        return result.detach()

    def of_outputs(self, outputs: Tensor, indices: Tensor) -> Any:
        """Returns the log-likelihoods of data with these outputs and indices [M]."""
        return self._log_likelihood(outputs, indices)


class RowCache:
    """Returns the rows ``tensor[indices]``, fetching only changed ones.

    For the closures of :class:`HMCECS`. One step changes 1 / ``num_blocks`` of its
    subsample, and fetching scattered rows of a large data set takes longer than
    computing with them.

    Args:
        tensors: the data, one or more tensors of equal length, on one device. They must
            not change.

    Raises:
        ValueError: no tensors, or of different lengths.

    Example:
        >>> rows = RowCache(x, y)
        >>> def closure(indices):
        ...     xs, ys = rows(indices)
        ...     return -F.binary_cross_entropy_with_logits(
        ...         xs @ theta, ys, reduction="none")
    """

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [t.shape[0] if t.dim() > 0 else 0 for t in tensors]
        if not tensors or len(set(lengths)) > 1 or any(t.dim() == 0 for t in tensors):
            raise ValueError(
                f"Invalid tensors: shapes {[list(t.shape) for t in tensors]} (must be "
                "one or more, of equal length)"
            )
        self.tensors = tensors
        self._indices: Tensor | None = None
        self._version = 0
        self._copy: Tensor | None = None
        self._rows: tuple[Tensor, ...] = ()

    def __call__(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Returns the rows of each tensor.

        Args:
            indices: int64 [M], in [0, length of the tensors).

        Returns:
            A tensor [M, ...] for each of the data. Do not change them in place: they
            are returned again for the same indices.
        """
        if indices is self._indices and indices._version == self._version:
            return self._rows
        self._rows = self._gather(indices)
        self._indices, self._version = indices, indices._version
        self._copy = indices.clone()  # the caller may change its indices in place
        return self._rows

    def _gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        if self._copy is not None and self._copy.shape == indices.shape:
            changed = (indices != self._copy).nonzero().flatten()
            if changed.shape[0] <= _FEW * indices.shape[0]:
                fresh = indices[changed]
                return tuple(
                    row.index_copy(0, changed, t.index_select(0, fresh))
                    for row, t in zip(self._rows, self.tensors, strict=True)
                )
        return tuple(t.index_select(0, indices) for t in self.tensors)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Returns all elements in one row."""
    return torch.cat([t.reshape(-1) for t in tensors])


def to_host(tensor: Tensor) -> Tensor:
    """Returns the values in float64 on the host, where all but the closure computes."""
    return tensor.detach().to("cpu", torch.float64)


def position(params: list[Tensor]) -> Tensor:
    """Returns θ, the parameters in one row, in float64 on the host: [d]."""
    return to_host(flat(params))


def split(theta: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Returns a row's parts in the shapes, types and places of the parameters."""
    parts = theta.split([p.numel() for p in params])
    return [part.view(p.shape).to(p) for part, p in zip(parts, params, strict=True)]


def log_likelihoods(closure: Closure, indices: Tensor) -> Tensor:
    """Calls the closure and checks its result."""
    values = closure(indices)
    if not isinstance(values, Tensor):
        wanted = "a tensor, of one for each index"
        raise hyperparams.wrong_result("log-likelihoods", values, wanted)
    if values.shape != indices.shape:
        wanted = f"{list(indices.shape)}, one for each index"
        raise hyperparams.wrong_shape("log-likelihoods", values, wanted)
    if torch.is_grad_enabled() and not values.requires_grad:
        raise RuntimeError(
            "HMCECS got log-likelihoods from the closure that do not depend on the "
            "parameters, or have no graph"
        )
    return values


def refuse_lightning(closure: Closure) -> None:
    """Raises for Lightning's closures, which take no indices."""
    if by_lightning(closure):
        raise TypeError(
            "HMCECS calls its closure with the indices of data, which Lightning does "
            "not pass on: set self.automatic_optimization = False, and in "
            "training_step call self.optimizers(use_pl_optimizer=False).step(closure)"
        )


def weighted_sum(values: Tensor, params: list[Tensor], weights: Tensor) -> Tensor:
    """Returns Σ wᵢ ∇ℓᵢ, in float64 on the host: [d]."""
    weights, more = weights.to(values), {"materialize_grads": True}
    grads = torch.autograd.grad(values, params, weights, allow_unused=True, **more)
    row = grads[0].reshape(-1) if len(grads) == 1 else flat(grads)
    return to_host(row).contiguous()  # a single gradient may be expanded


class LikelihoodGraph:
    """Derivatives of log-likelihoods [M] with a graph, by the parameters.

    With weights w, one for each datum, s(w) = Σ wᵢ ∇ℓᵢ is a backward pass. It is linear
    in w, so its derivative by w gives all gradients ∇ℓᵢ. The same for a directional
    derivative in place of ℓ gives all Hᵢ z.
    """

    def __init__(self, values: Tensor, params: list[Tensor]) -> None:
        self.values, self.params = values, params
        self.weights = torch.ones_like(values).requires_grad_()
        self.gradient = _flat_gradient(values, params, self.weights)

    def gradients(self) -> Tensor:
        """Returns ∇ℓᵢ: [M, d]."""
        return _columns_of_linear(self.gradient, self.weights).t().contiguous()

    def hessian(self) -> Tensor:
        """Returns Σ Hᵢ: [d, d]."""
        width = len(self.gradient) + len(self.values)
        return jacobian(self.gradient, self.params, width)

    def hessian_products(self, z: Tensor) -> Tensor:
        """Returns Hᵢ z: [M, d]."""
        along = self.along(z)
        if along.requires_grad:  # else ℓ is linear
            weights = torch.ones_like(along).requires_grad_()
            products = _flat_gradient(along, self.params, weights)
            if products.requires_grad:
                return _columns_of_linear(products, weights).t().contiguous()
        return self.values.new_zeros(len(self.values), len(z))

    def along(self, z: Tensor) -> Tensor:
        """Returns the derivatives in the direction z, ∇ℓᵢᵀz, with a graph: [M]."""
        return torch.autograd.grad(
            self.gradient, self.weights, z.to(self.gradient), create_graph=True
        )[0]


def _flat_gradient(outputs: Tensor, params: list[Tensor], weights: Tensor) -> Tensor:
    """Returns the weighted outputs' gradient by all parameters, [d], with a graph."""
    with torch.enable_grad():
        more = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
        return flat(torch.autograd.grad(outputs, params, weights, **more))


def _columns_of_linear(linear: Tensor, weights: Tensor) -> Tensor:
    """Returns the derivative of ``linear`` [d], with a graph, by M weights: [d, M]."""
    d, size = len(linear), weights.numel()
    out = linear.new_empty(d, size)
    begin = 0
    for basis in _bases(d, linear, d + size):
        end = begin + len(basis)
        if size < _SINGLY:
            (rows,) = _batched_gradients(linear, [weights], basis)
            out[begin:end] = rows.reshape(-1, size)
        else:
            for direction, row in zip(basis, out[begin:end], strict=True):
                (part,) = torch.autograd.grad(
                    linear, weights, direction, retain_graph=True
                )
                row.copy_(part.reshape(size))
        begin = end
    return out


def _batched_gradients(
    outputs: Tensor, inputs: list[Tensor], basis: Tensor, *, allow_unused: bool = False
) -> tuple[Any, ...]:
    """Returns the gradients for each row of ``basis``."""
    more = {"retain_graph": True, "is_grads_batched": True}
    with Interrupts():  # torch.vmap stays entered after one
        return torch.autograd.grad(
            outputs, inputs, basis, allow_unused=allow_unused, **more
        )


def jacobian(outputs: Tensor, params: list[Tensor], width: int) -> Tensor:
    """Returns the derivatives of ``outputs`` [n], with a graph, by parameters: [n, d].

    ``width`` estimates the elements of the pass for one row.
    """
    rows = []
    for basis in _bases(len(outputs), outputs, width):
        parts = _batched_gradients(outputs, params, basis, allow_unused=True)
        count = len(basis)
        columns = [
            p.new_zeros(count, p.numel()) if g is None else g.reshape(count, -1)
            for p, g in zip(params, parts, strict=True)
        ]
        rows.append(torch.cat(columns, 1))
    return torch.cat(rows)


def _bases(d: int, like: Tensor, width: int) -> Iterable[Tensor]:
    """Yields the rows of the identity, in pieces that keep memory bounded."""
    rows = max(1, _MOST_ELEMENTS // width)
    for begin in range(0, d, rows):
        count = min(rows, d - begin)
        basis = torch.zeros(count, d, dtype=like.dtype, device=like.device)
        basis[:, begin : begin + count].fill_diagonal_(1)
        yield basis
