"""Checks of what HMC-ECS keeps in a state dict beside its hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_sgmcmc.chain.checks import check_integer
from torch_sgmcmc.chain.rows import mapped
from torch_sgmcmc.chain.state_checks import check_tensor
from torch_sgmcmc.ecs.taylor import (
    CONSTANT,
    LINEAR,
    PREDICTOR,
    WHOLE,
    has_hessian,
    kinds_of,
)

__all__ = ["KEYS", "check_anchored_state", "on_device"]

# Of what belongs to no single parameter, but goes with θ*.
KEYS = ("control_variates", "subsample")

_FORMS = (CONSTANT, LINEAR, PREDICTOR, WHOLE)
_SIZES = ("num_data", "num_cells", "num_blocks", "batch_size")


def check_anchored_state(state: dict[str, Any], d: int) -> None:
    """Raises if control variates or subsample are not whole, of θ [d]."""
    anchored = state.get("control_variates")
    if anchored is not None:
        _check_anchor(anchored, d)
    if "subsample" in state:
        if anchored is None:
            raise ValueError(
                "Invalid state_dict: it has a subsample without control_variates"
            )
        _check_subsample(state["subsample"], anchored["form"], d)


def on_device(value: Any, device: torch.device) -> Any:
    """The same with all tensors on this device, those in lists and dicts too."""
    return mapped(lambda tensor: tensor.to(device), value)


def _check_anchor(kept: Any, d: int) -> None:
    what = "control_variates"
    names = ("anchor", "num_data", "value", "gradient", "hessian", "form")
    _need(what, kept, (*names, "whitening"))
    form, size = kept["form"], getattr(kept["anchor"], "shape", ())
    if form not in _FORMS:
        raise ValueError(f"Invalid state_dict: {what} of the form {form!r}")
    if len(size) == 1 and size[0] != d:
        raise ValueError(
            f"Invalid state_dict: its control variates are those of {size[0]} "
            f"parameters, expected {d}"
        )
    _double("anchor", kept["anchor"], [d])
    check_integer("num_data", kept["num_data"], low=1)
    _double("value", kept["value"], [])
    _double("gradient", kept["gradient"], [d])
    _check_optional("hessian", kept["hessian"], has_hessian(form), [d, d])
    whitening = kept["whitening"]
    if whitening is not None:
        matrix = getattr(whitening, "ndim", 0) == 2
        _double("whitening", whitening, [d, d] if matrix else [d])


def _check_subsample(kept: Any, form: str, d: int) -> None:
    _need("subsample", kept, ("layout", "counts", "indices", "terms"))
    _check_number("layout", kept["layout"], 6)
    num_data, num_cells, _, batch_size, poisson, seed = kept["layout"]
    for name, value in zip(_SIZES, kept["layout"], strict=False):
        check_integer(name, value, low=1)
    if not isinstance(poisson, bool):
        raise TypeError(f"Invalid poisson: {poisson!r} (must be a bool)")
    check_integer("seed", seed, low=-(2**63))
    _check_number("counts", kept["counts"], num_cells)
    m = batch_size * sum(check_integer("counts", n) for n in kept["counts"])
    indices = kept["indices"]
    check_tensor("indices", indices, [m], torch.int64)
    if m and not 0 <= int(indices.min()) <= int(indices.max()) < num_data:
        raise ValueError(
            f"Invalid state_dict: indices of its subsample are not in [0, {num_data})"
        )
    _check_number("terms", kept["terms"], 4)
    values, slopes, scales, hessians = kept["terms"]
    _double("values", values, [m])
    kinds = kinds_of(form)
    _double("slopes", slopes, [kinds, m, d])
    _check_optional("scales", scales, kinds == 2, [m])
    _check_optional("hessians", hessians, form == WHOLE, [m, d, d])


def _need(what: str, kept: Any, keys: Sequence[str]) -> None:
    if not isinstance(kept, dict):
        raise ValueError(
            f"Invalid state_dict: {what} is a {type(kept).__name__} (must be a dict)"
        )
    missing = sorted(set(keys).difference(kept))
    if missing:
        raise ValueError(f"Invalid state_dict: its {what} lacks {', '.join(missing)}")


def _check_number(what: str, values: Any, expected: int) -> None:
    if not isinstance(values, (list, tuple)) or len(values) != expected:
        raise ValueError(
            f"Invalid state_dict: {what} is not a list of {expected} elements"
        )


def _check_optional(what: str, value: Any, wanted: bool, shape: Sequence[int]) -> None:
    if wanted:
        _double(what, value, shape)
    elif value is not None:
        raise ValueError(
            f"Invalid state_dict: {what} is a {type(value).__name__} (must be None)"
        )


def _double(what: str, value: Any, shape: Sequence[int]) -> None:
    check_tensor(what, value, shape, torch.float64)
