"""State of parameters: prior means, masters, momenta, and what users give.

Tensors that users give (prior means, masses, preconditioners) are copied in the type of
the arithmetic, and are then the sampler's state. A number is an ordinary
hyperparameter.

Note [Rescaled momenta]
A momentum is the move of a step, √(lr / N) times the momentum of unit mass: in
equilibrium Var(v) = lr T / N. If lr falls and v stays, v is too large for about 1 / (1
- momentum) steps, at every change. So each param group records the (lr, T, N) of its
momenta. After a change of these, all momenta are multiplied by the change of √(lr T /
N), as in the table in docs/changing_settings.md.

The factor is a number of the update, so it costs no pass over memory; momenta of
parameters that the step does not update are multiplied after it. The record changes
with them: a skipped or refused step changes neither. For samplers with
``capturable=True`` the host does not know which steps the device skips. They are
rescaled in a separate pass before the step, outside of CUDA graphs and compiled blocks.

At lr = 0 a group rests: nothing moves, and momenta and record stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import dtensor
from torch_sgmcmc.core.context import (
    StepContext,
    has_master,
    local,
    name_of,
    state_dtype,
)
from torch_sgmcmc.core.hyperparams import (
    ESTIMATE_SETTINGS,
    MOMENTUM_SETTINGS,
    is_drawn,
    scales,
    settings_of,
)
from torch_sgmcmc.core.ops import gaussian_, square_root_

#: The key of the prior mean in a parameter's state and in a group.
PRIOR_MEAN = "prior_mean"
#: The key of A of SBPS, and of G of other samplers (preconditioner.py).
PRECONDITIONER = "preconditioner"
#: The key of M of HMC.
MASS = "mass"


def check_not_capturing(sampler: str, p: Tensor, what: str) -> None:
    """Raises if state would be created inside of a CUDA graph."""
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{sampler} must make one step before it is captured in a CUDA graph: a "
            f"parameter has no {what} yet"
        )


def start_masters(context: StepContext, params: list[Tensor]) -> list[Tensor]:
    """Creates missing masters of bf16 and fp16 parameters; returns all, in order."""
    masters = []
    for p in params:
        if has_master(p):
            state = context.state[p]
            if "master" not in state:
                check_not_capturing(context.name, p, "master")
                context.create(p, "master", p.detach().to(state_dtype(p)))
            masters.append(state["master"])
    return masters


def start_momenta(
    context: StepContext,
    group: dict[str, Any],
    params: list[Tensor],
    offsets: list[int],
    *,
    stationary: bool = True,
) -> None:
    """Creates missing momenta, drawn from their stationary law, or zeros."""
    new = [i for i, p in enumerate(params) if "momentum" not in context.state[p]]
    if not new:
        return
    params = [params[i] for i in new]
    check_not_capturing(context.name, params[0], "momentum")
    momenta = draw_stationary(
        context, group, params, [offsets[i] for i in new], stationary=stationary
    )
    for p, momentum in zip(params, momenta, strict=True):
        context.create(p, "momentum", momentum)


def draw_stationary(
    context: StepContext,
    group: dict[str, Any],
    params: list[Tensor],
    offsets: list[int],
    *,
    stationary: bool = True,
) -> list[Tensor]:
    """Returns momenta drawn from N(0, lr T G / N), or zeros; G is 1 unless given.

    If the update rescales momenta of other settings, these are drawn for those
    settings.
    """
    new = torch.empty_like if stationary else torch.zeros_like
    momenta = [new(p, dtype=state_dtype(p)) for p in params]
    if stationary:
        variance = float(group["lr"]) * group["temperature"] / group["num_data"]
        context.placement.updating(gaussian_)(
            momenta,
            std=math.sqrt(variance) / scales(group).get("momentum_scale", 1.0),
            offsets=offsets,
            purpose=_C.Purpose.MOMENTUM,
            **context.noise(),
        )
        for p, momentum in zip(params, momenta, strict=True):
            if PRECONDITIONER in context.state.get(p, ()):
                momentum.mul_(root(context, context.state[p][PRECONDITIONER]))
    return momenta


@torch.no_grad()
def draw_from_prior(context: StepContext) -> list[str]:
    """Draws parameters from their prior; returns the names of others (λ = 0)."""
    kept = []
    for group in context.groups:
        precision = group["prior_precision"]
        for p, offset in zip(group["params"], group["offsets"], strict=True):
            if not p.requires_grad:
                continue
            if precision == 0:
                kept.append(name_of(context.groups, p))
                continue
            value = torch.empty_like(p, dtype=state_dtype(p))
            context.placement.updating(gaussian_)(
                [value],
                std=math.sqrt((group["temperature"] or 1.0) / precision),
                offsets=[offset],
                purpose=_C.Purpose.PRIOR,
                **context.noise(),
            )
            value += context.state.get(p, {}).get(PRIOR_MEAN, group[PRIOR_MEAN])
            p.copy_(value)
    return kept


# Names of rescaled state, and of the operators' factors.
_SCALED = {"momentum": "momentum_scale", "thermostat": "thermostat_scale"}


def redraw_momenta(context: StepContext) -> None:
    """Draws all momenta of the groups whose T is no longer 0, before any update.

    The new momenta are other tensors, which a failed step undoes, except with
    ``capturable``.
    """
    for group in context.groups:
        if not is_drawn(group):
            continue
        _refuse_capture(context, group)
        by_device: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
        for p, offset in zip(group["params"], group["offsets"], strict=True):
            if "momentum" in context.state.get(p, {}):
                params, offsets = by_device.setdefault(p.device, ([], []))
                params.append(p)
                offsets.append(offset)
        stationary = group.get("initial_momentum", "stationary") == "stationary"
        for params, offsets in by_device.values():
            drawn = draw_stationary(
                context, group, params, offsets, stationary=stationary
            )
            for p, momentum in zip(params, drawn, strict=True):
                if group["capturable"]:
                    context.state[p]["momentum"].copy_(momentum)
                else:
                    context.create(p, "momentum", momentum)


def leaves_momenta(context: StepContext, params: list[Tensor]) -> bool:
    """Returns whether there are momenta of other parameters."""
    updated = {id(p) for p in params}
    return any(
        id(p) not in updated and "momentum" in context.state.get(p, {})
        for group in context.groups
        for p in group["params"]
    )


class Rescaling(NamedTuple):
    """The rescaling of the momenta of a group whose lr, T or N has changed."""

    group: dict[str, Any]
    now: list[float]
    factors: dict[str, float]
    draws: bool  # new momenta, as after T = 0


def rescalings(context: StepContext) -> list[Rescaling]:
    """Returns the rescalings of the next step."""
    changes = []
    for group in context.groups:
        now = _changed(group)
        if now is not None:
            factors = scales(group, now)
            draws = "momentum_scale" not in factors and is_drawn(group)
            changes.append(Rescaling(group, now, factors, draws))
    return changes


def set_records(context: StepContext, changes: list[Rescaling]) -> None:
    """Sets the records of rescaled groups; a failed step undoes it."""
    for change in changes:
        record = change.group[MOMENTUM_SETTINGS]
        context.changed_records.append((record, [*record]))
        record[:] = change.now


def rescale_others(
    context: StepContext, changes: list[Rescaling], params: list[Tensor]
) -> None:
    """Rescales momenta of parameters that the update did not include."""
    updated = {id(p) for p in params}
    for group, _, factors, _ in changes:
        _multiply(
            context, [p for p in group["params"] if id(p) not in updated], factors
        )


def rescale_now(context: StepContext) -> None:
    """Rescales all momenta of all groups, and sets their records."""
    for group in context.groups:
        now = _changed(group)
        if now is None or not group[MOMENTUM_SETTINGS]:
            continue
        _refuse_capture(context, group)
        found = scales(group)
        if found:
            _multiply(context, group["params"], found)
        group[MOMENTUM_SETTINGS][:] = now


def _changed(group: Mapping[str, Any]) -> list[float] | None:
    if MOMENTUM_SETTINGS not in group:
        return None
    now = settings_of(group)
    return None if now[0] == 0 or group[MOMENTUM_SETTINGS] == now else now


def _multiply(
    context: StepContext, params: list[Tensor], found: Mapping[str, float]
) -> None:
    for key, name in _SCALED.items():
        tensors = [
            context.state[p][key] for p in params if key in context.state.get(p, {})
        ]
        if name in found and tensors:
            torch._foreach_mul_(context.placement.local(tensors), found[name])


def _refuse_capture(context: StepContext, group: Mapping[str, Any]) -> None:
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{context.name} cannot rescale its momenta in a CUDA graph: lr, "
            f"temperature or num_data of a param group are {settings_of(group)}, and "
            f"its momenta belong to {group[MOMENTUM_SETTINGS]} (make a step before the "
            "capture, or between replays)"
        )


def record_estimate(
    context: StepContext,
    groups: Iterable[dict[str, Any]] | None = None,
    *,
    can_fail: bool = False,
) -> None:
    """Records the lr, T and N of new noise estimates, of these groups or of all.

    A failed step undoes it, if it ``can_fail``.
    """
    for group in context.groups if groups is None else groups:
        if ESTIMATE_SETTINGS not in group:
            continue
        given, known = group["noise_estimate"], group[ESTIMATE_SETTINGS]
        before = [*known]
        if isinstance(given, str) or given == 0:
            known.clear()
        elif not known or known[0] != given:
            now = settings_of(group)
            if now[0] > 0 and now[1] > 0:
                known[:] = [float(given), *now]
        if can_fail and known != before:
            context.changed_records.append((known, before))


def check_records(group: Mapping[str, Any], records: Iterable[str]) -> None:
    """Raises if a saved group has an impossible record."""
    for key in records:
        record = group[key]
        if record is None or record == []:
            continue
        estimate = 1 if key == ESTIMATE_SETTINGS else 0
        if not isinstance(record, (list, tuple)) or len(record) != 3 + estimate:
            raise ValueError(
                f"Invalid {key}: {record!r} (must be None or a list of "
                f"{3 + estimate} numbers)"
            )
        if not any(record):  # of a chain at its start
            continue
        if not all(type(n) is float and math.isfinite(n) for n in record):
            raise ValueError(f"Invalid {key}: {record!r} (must be finite floats)")
        lr, temperature, num_data = record[estimate:]
        if lr <= 0 or temperature < 0 or num_data <= 0:
            raise ValueError(
                f"Invalid {key}: {record!r} (must have lr > 0, temperature >= 0 and "
                "num_data > 0)"
            )


def root(context: StepContext, tensor: Tensor) -> Tensor:
    """Returns the correctly rounded square root.

    torch's square root on a CPU is off by a unit in the last place for up to a fifth of
    all numbers, differently on each maker's processors; on a GPU it is exact.
    """
    roots = tensor.detach().clone()
    context.placement.without_noise(square_root_)([roots])
    return roots


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


def mean_marks(means: Iterable[Tensor | None]) -> list[Any]:
    """Returns what changes if a prior mean is replaced or written to."""
    return [
        None if mean is None else (id(mean), mean.is_inference() or mean._version)
        for mean in means
    ]


def means_of(state: Mapping[Any, Any], params: Sequence[Tensor]) -> list[Tensor] | None:
    """Returns the tensors of a group's prior means, None without any."""
    check_means(state, params)
    if params and PRIOR_MEAN in state.get(params[0], ()):
        return [state[p][PRIOR_MEAN] for p in params]
    return None


def check_means(state: Mapping[Any, Any], params: Sequence[Tensor]) -> None:
    """Raises if some parameters of a group have a tensor of prior means."""
    having = [PRIOR_MEAN in state.get(p, ()) for p in params]
    if any(having) and not all(having):
        lacking = params[having.index(False)]
        raise ValueError(
            f"Invalid state: a parameter of shape {list(lacking.shape)} has no "
            f"{PRIOR_MEAN}, and others of its group have one (was it replaced? Put a "
            f"tensor of its shape into state[p][{PRIOR_MEAN!r}])"
        )


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


def copied(value: Any) -> Any:
    """Returns a clone of a tensor, other values unchanged."""
    return value.clone() if isinstance(value, Tensor) else value


def given(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a parameter's state that a user gave."""
    keys = [PRIOR_MEAN, MASS]
    if "square_average" not in state:  # a learned A comes from it
        keys.append(PRECONDITIONER)
    return {key: state[key] for key in keys if key in state}


def note_given(context: StepContext) -> None:
    """Records the state that the user has given, in place of what was known."""
    context.given = {}
    restore_given(context)


def restore_given(context: StepContext) -> None:
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

    torch.distributed.checkpoint skips these. Where others of a group have a prior mean,
    the former one is kept, or else the number is used.
    """
    for group in groups:
        params = group["params"]
        lacking = [p for p in params if PRIOR_MEAN not in state.get(p, {})]
        for p in lacking if len(lacking) < len(params) else ():
            number = torch.full_like(p, group[PRIOR_MEAN], dtype=state_dtype(p))
            mean = before.get(p, {}).get(PRIOR_MEAN, number.detach())
            state[p][PRIOR_MEAN] = mean
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


def is_preconditioned(state: Mapping[Any, Any], group: Mapping[str, Any]) -> bool:
    """Returns whether a parameter of a sampler's group has a preconditioner."""
    return any(PRECONDITIONER in state.get(p, ()) for p in group["params"])


def preconditioners_of(context: StepContext, params: Sequence[Tensor]) -> list[Tensor]:
    """Returns the parameters' preconditioners, 1 where one lacks it."""
    for p in params:
        if PRECONDITIONER not in context.state[p]:
            ones = torch.ones_like(p, dtype=state_dtype(p))
            context.create(p, PRECONDITIONER, ones)
    return [context.state[p][PRECONDITIONER] for p in params]


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
    part = local(tensor)
    is_wrong = not bool((part.isfinite() & (part > 0)).all())
    return dtensor.max_over_ranks([tensor], float(is_wrong)) == 0
