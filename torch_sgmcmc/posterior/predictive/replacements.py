"""Draws as tensors that take the place of a model's own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torch_sgmcmc.chain.checks import check_real, wrong_type
from torch_sgmcmc.chain.wrappers import plain_names, resolved, unwrapped
from torch_sgmcmc.posterior.store import Draw
from torch_sgmcmc.posterior.store_files import checksums

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
        self._of_plain = {
            plain: name for name, plain in plain_names(model, self._own).items()
        }
        self._places: dict[str, tuple[Tensor, str]] = {}
        self._checked: set[int] = set()  # the checksums of stores, by their objects

    def of(self, draw: Any) -> dict[str, Tensor]:
        """The draw's tensors by name.

        Raises:
            TypeError: it is neither a mapping nor a module, or has what is no tensor.
            ValueError: it is empty, or has a name or a shape that the model has not.
        """
        if isinstance(draw, nn.Module):
            draw = unwrapped(draw)
            draw = {**dict(draw.named_parameters()), **dict(draw.named_buffers())}
        elif not isinstance(draw, Mapping):
            wanted = "a mapping from names to tensors, or a module"
            raise wrong_type("draw", draw, wanted)
        if isinstance(draw, Draw):
            self._check_base(draw)
        found: dict[str, Tensor] = {}
        for name in draw:
            if name.rpartition(".")[2] == "_extra_state":
                continue  # of a state dict, and no tensor of the model
            value = draw[name]
            own, first = self._place(name)
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
            # Looked at first: for thousands of small draws it would take most of all.
            if value.dtype != own.dtype or value.device != own.device:
                value = value.to(own.device, own.dtype)
            found.setdefault(first, value)
        if not found:
            raise ValueError("Invalid draw: it has no tensor")
        return found

    def _place(self, given: str) -> tuple[Tensor, str]:
        """The model's tensor, and its first name, for the name in a draw."""
        place = self._places.get(given)
        if place is None:
            name = self._of_plain.get(resolved(given, self._of_plain), given)
            if name not in self._own:
                raise ValueError(
                    f"Invalid draw: the model has no parameter or buffer {given!r}"
                )
            place = self._places[given] = self._own[name], self._first[name]
        return place

    def _check_base(self, draw: Draw) -> None:
        """Warns, once a store, if draws of a part are put into another whole."""
        sums = draw.not_sampled
        if id(sums) in self._checked:
            return
        self._checked.add(id(sums))
        plain = {plain: self._own[name] for plain, name in self._of_plain.items()}
        own = checksums({name: plain[name] for name in sums if name in plain})
        others = [name for name, value in sums.items() if own.get(name) != value]
        if others:
            place = "memory" if draw.path is None else str(draw.path.parents[1])
            warnings.warn(
                f"Draws of chain {draw.chain} of {place} are of a part of a "
                f"model, and {len(others)} of its other parameters, {others[0]!r} "
                "among them, are not those that the draws were made with: load these "
                "into the model, in their dtype",
                UserWarning,
                stacklevel=2,
            )


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
