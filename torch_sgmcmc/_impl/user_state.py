"""State that users give: prior means, masses, preconditioners.

Tensors are copied in the type of the arithmetic, and are then the sampler's state. A
number is an ordinary hyperparameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc._impl import dtensor
from torch_sgmcmc._impl.utils import state_dtype

#: The key of the prior mean in a parameter's state and in a group.
PRIOR_MEAN = "prior_mean"


def number_or(value: Any) -> tuple[Any, list[Tensor] | None]:
    """Splits a prior mean into a number, or 0.0 and the tensors."""
    if isinstance(value, Tensor):
        return (0.0, [value]) if value.dim() > 0 else (value.item(), None)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        return value, None
    tensors = list(value)
    for i, each in enumerate(tensors):
        if not isinstance(each, Tensor):
            raise TypeError(
                f"Invalid prior_mean: number {i} is a {type(each).__name__} (must be a "
                "Tensor)"
            )
    return 0.0, tensors


@torch.no_grad()
def copies(means: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Returns the prior means of these parameters, as stored."""
    if len(means) != len(params):
        raise ValueError(
            f"Invalid prior_mean: {len(means)} tensors for a group of {len(params)} "
            "parameters (must be one for each; of several groups each needs its own)"
        )
    result = []
    for i, (mean, p) in enumerate(zip(means, params, strict=True)):
        if not mean.is_floating_point() or mean.layout is not torch.strided:
            raise ValueError(
                f"Invalid prior_mean: number {i} is of {mean.dtype} and layout "
                f"{mean.layout} (must be floating point, and torch.strided)"
            )
        if mean.shape != p.shape:
            raise ValueError(
                f"Invalid prior_mean: number {i} has shape {list(mean.shape)} (must be "
                f"{list(p.shape)}, its parameter's shape)"
            )
        mean = dtensor.like(p, mean, f"prior_mean: number {i}")
        result.append(torch.empty_like(p, dtype=state_dtype(p)).copy_(mean))
        if not dtensor.is_finite(result[-1]):
            raise ValueError(
                f"Invalid prior_mean: number {i} has elements that are not finite"
            )
    return result


def complete_means(
    groups: Iterable[dict[str, Any]], state: Any, before: Mapping[Any, Any]
) -> None:
    """Completes a loaded state's prior means where others of the group have one.

    The former mean is kept, or else the number is used.
    """
    for group in groups:
        having = [PRIOR_MEAN in state.get(p, {}) for p in group["params"]]
        if not any(having):
            continue
        for p, has in zip(group["params"], having, strict=True):
            if not has:
                number = torch.full_like(p, group[PRIOR_MEAN], dtype=state_dtype(p))
                mean = before.get(p, {}).get(PRIOR_MEAN, number.detach())
                state[p][PRIOR_MEAN] = mean


def means_of(state: Mapping[Any, Any], params: Sequence[Tensor]) -> list[Tensor] | None:
    """Returns the tensors of a group's prior means, None without any."""
    # All parameters of a group have one, or none.
    if params and PRIOR_MEAN in state.get(params[0], ()):
        return [state[p][PRIOR_MEAN] for p in params]
    return None


def prior_of(
    state: Mapping[Any, Any], group: dict[str, Any], params: Sequence[Tensor]
) -> dict[str, Any]:
    """Returns the arguments prior_mean and prior_means of an operator."""
    return {"prior_mean": group[PRIOR_MEAN], "prior_means": means_of(state, params)}


def away_from_mean(
    state: Mapping[Any, Any], group: dict[str, Any], p: Tensor
) -> Tensor:
    """Returns θ - μ of a parameter, in the type of the arithmetic if μ is not 0."""
    mean = state.get(p, {}).get(PRIOR_MEAN, group[PRIOR_MEAN])
    if not isinstance(mean, Tensor) and mean == 0:
        return p.detach()
    return p.detach().to(state_dtype(p)) - mean


#: The key of the sampler's step counter, one tensor for all parameters.
STEP = "step"
#: The key of A of SBPS.
PRECONDITIONER = "preconditioner"
#: The key of M of HMC.
MASS = "mass"


def copied(value: Any) -> Any:
    """Returns a clone of a tensor, other values unchanged."""
    return value.clone() if isinstance(value, Tensor) else value


def given(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a parameter's state that a user gave."""
    keys = [PRIOR_MEAN, MASS]
    if "square_average" not in state:  # a learned A comes from it
        keys.append(PRECONDITIONER)
    return {key: state[key] for key in keys if key in state}


def restore_given(context: Any) -> None:
    """Restores what the user has given and then cleared, and records all of it.

    Users clear ``state`` to start with new momenta.
    """
    for p in context.params:
        for key, value in context.given.get(p, {}).items():
            context.state[p].setdefault(key, value)
    own = {p: given(context.state.get(p, {})) for p in context.params}
    context.given = {p: found for p, found in own.items() if found}


def complete_given(
    groups: Iterable[dict[str, Any]], state: Any, before: Mapping[Any, Any]
) -> None:
    """Completes a loaded state of parameters that do not move.

    torch.distributed.checkpoint skips these.
    """
    complete_means(groups, state, before)
    for key in (PRECONDITIONER, MASS):
        if not any(key in given(kept) for kept in state.values()):
            continue
        for p, kept in before.items():
            if key in given(kept) and not p.requires_grad:
                state[p].setdefault(key, kept[key])


@torch.no_grad()
def diagonals(
    what: str, given: Iterable[Tensor | float], params: Sequence[Tensor]
) -> list[Tensor]:
    """Returns a diagonal matrix for each parameter: a copy of its shape and layout."""
    given = list(given)
    if len(given) != len(params):
        raise ValueError(
            f"Invalid {what}: {len(given)} (must be one for each of the "
            f"{len(params)} parameters)"
        )
    return [
        _diagonal(f"{what}: number {i}", value, p)
        for i, (value, p) in enumerate(zip(given, params, strict=True))
    ]


def check_saved_diagonal(name: str, index: int, value: Tensor, p: Tensor) -> None:
    """Raises if the saved diagonal of a parameter is out of range in its precision."""
    if not _is_positive(value.to(state_dtype(p))):
        raise ValueError(
            f"Invalid state_dict: {name} of parameter {index} has elements out of "
            "range (must be finite and > 0)"
        )


def _diagonal(name: str, value: Tensor | float, p: Tensor) -> Tensor:
    if isinstance(value, Tensor) and dtensor.is_dtensor(value):
        given = dtensor.like(p, value, name).to(state_dtype(p))
    else:
        given = torch.as_tensor(value, dtype=state_dtype(p), device=p.device)
    try:
        expanded = given.expand(p.shape)
    except RuntimeError:
        raise ValueError(
            f"Invalid {name} has shape {list(given.shape)} (must broadcast to "
            f"{list(p.shape)})"
        ) from None
    if not _is_positive(given):
        raise ValueError(
            f"Invalid {name} has elements out of range (must be finite and > 0)"
        )
    expanded = dtensor.like(p, expanded, name)
    return torch.empty_like(p, dtype=state_dtype(p)).copy_(expanded)


def _is_positive(tensor: Tensor) -> bool:
    """Returns whether all elements on all ranks are finite and > 0."""
    part = dtensor.local(tensor)
    is_wrong = not bool((part.isfinite() & (part > 0)).all())
    return dtensor.max_over_ranks([tensor], float(is_wrong)) == 0
