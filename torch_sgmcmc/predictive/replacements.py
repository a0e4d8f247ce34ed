"""Draws as tensors that take the place of a model's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torch_sgmcmc.core.checks import check_real

__all__ = ["Replacements", "weight_of"]


class Replacements:
    """Checks that a draw fits a model, and brings it to the model's types."""

    def __init__(self, model: nn.Module) -> None:
        self._own: dict[str, Tensor] = {}
        self._first: dict[str, str] = {}  # of the names of tied weights
        seen: dict[int, str] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._own[name] = tensor
                self._first[name] = seen.setdefault(id(tensor), name)

    def of(self, draw: Any) -> dict[str, Tensor]:
        """The draw's tensors by name.

        Raises:
            TypeError: it is neither a mapping nor a module, or has what is no tensor.
            ValueError: it is empty, or has a name or a shape that the model has not.
        """
        if isinstance(draw, nn.Module):
            draw = {**dict(draw.named_parameters()), **dict(draw.named_buffers())}
        elif not isinstance(draw, Mapping):
            raise TypeError(
                f"Invalid draw: of type {type(draw).__name__} (must be a mapping from "
                "names to tensors, or a module)"
            )
        found: dict[str, Tensor] = {}
        for name in draw:
            if name.rpartition(".")[2] == "_extra_state":
                continue  # of a state dict, and no tensor of the model
            value = draw[name]
            if name not in self._own:
                raise ValueError(
                    f"Invalid draw: the model has no parameter or buffer {name!r}"
                )
            own = self._own[name]
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"Invalid draw: {name!r} is of type {type(value).__name__} (must "
                    "be a Tensor)"
                )
            if value.shape != own.shape:
                raise ValueError(
                    f"Invalid draw: {name!r} has shape {list(value.shape)}, in the "
                    f"model {list(own.shape)}"
                )
            found.setdefault(
                self._first[name], value.detach().to(own.device, own.dtype)
            )
        if not found:
            raise ValueError("Invalid draw: it has no tensor")
        return found


def weight_of(draw: Any, weight: Any) -> float:
    """The weight that is given, else the draw's own, else 1.

    Raises:
        TypeError, ValueError: it is no finite number.
    """
    if weight is None:
        # A module's weight is a parameter.
        weight = 1.0 if isinstance(draw, nn.Module) else getattr(draw, "weight", 1.0)
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    number = check_real("weight", weight, low=-math.inf)
    if number == -math.inf:
        raise ValueError(f"Invalid weight: {number} (must be finite)")
    return number
