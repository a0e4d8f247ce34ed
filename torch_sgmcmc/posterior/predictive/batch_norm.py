"""The running statistics of batch norm, which belong to the draw."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_sgmcmc.posterior.predictive.batches import Batches
from torch_sgmcmc.posterior.predictive.forward import Evaluation

__all__ = ["BatchNorm"]


class BatchNorm:
    """Those layers of a model that have running statistics.

    Each draw's are computed anew on the data ``refresh``, or are the draw's own, with a
    warning once if it has none.
    """

    def __init__(self, model: nn.Module, refresh: Batches | None) -> None:
        self._layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        }
        self._refresh = refresh
        self._buffers = [
            f"{name}.{kind}" if name else kind
            for name in self._layers
            for kind in ("running_mean", "running_var")
        ]
        self._before = _before_last(model, list(self._layers))
        self._warned = False

    def of(
        self, tensors: Mapping[str, Tensor], evaluation: Evaluation, *, live: bool
    ) -> Mapping[str, Tensor]:
        """A draw's tensors, with statistics that fit."""
        if not self._layers:
            return tensors
        if self._refresh is not None:
            return self._refreshed(tensors, evaluation, self._refresh)
        if not live and not self._warned and self._are_stale(tensors):
            self._warned = True
            missing = next(name for name in self._buffers if name not in tensors)
            warnings.warn(
                "The model has batch norm, and a draw has parameters before it but no "
                f"statistics ({missing!r}): those of the model are used, which belong "
                "to other parameters. Keep buffers with the draws, or give "
                "refresh_batch_norm=loader",
                UserWarning,
                stacklevel=2,
            )
        return tensors

    def _are_stale(self, tensors: Mapping[str, Tensor]) -> bool:
        complete = all(name in tensors for name in self._buffers)
        return not complete and not self._before.isdisjoint(tensors)

    def _refreshed(
        self, tensors: Mapping[str, Tensor], evaluation: Evaluation, batches: Batches
    ) -> dict[str, Tensor]:
        fresh: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            start = f"{name}." if name else ""
            assert layer.running_mean is not None and layer.running_var is not None
            assert layer.num_batches_tracked is not None
            fresh[f"{start}running_mean"] = torch.zeros_like(layer.running_mean)
            fresh[f"{start}running_var"] = torch.ones_like(layer.running_var)
            fresh[f"{start}num_batches_tracked"] = torch.zeros_like(
                layer.num_batches_tracked
            )
        together = {**tensors, **fresh}
        with self._averaging():
            evaluation.run(together, batches)  # which writes into the fresh ones
        return together

    @contextmanager
    def _averaging(self) -> Iterator[None]:
        """All batches count alike, and only these layers are in training mode."""
        before = [(m, m.momentum, m.training) for m in self._layers.values()]
        try:
            for layer in self._layers.values():
                layer.momentum = None
                layer.training = True
            yield
        finally:
            for layer, momentum, training in before:
                layer.momentum = momentum
                layer.training = training


def _before_last(model: nn.Module, layers: list[str]) -> set[str]:
    """Names of parameters that come before the last layer, and change its inputs.

    By the order in which modules are registered, which is mostly that of their use.
    """
    found: set[str] = set()
    if layers:
        for name, module in model.named_modules():
            if name == layers[-1]:
                break
            for own, _ in module.named_parameters(recurse=False):
                found.add(f"{name}.{own}" if name else own)
    return found
