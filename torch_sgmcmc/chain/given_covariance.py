"""SGHMC's Var(ḡ) that users give as one matrix over all coordinates.

It is in the state of the sampler under :data:`COVARIANCE`, as it belongs to no single
parameter, and makes the noise of all lists of a step at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain as chained
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain import distributed
from torch_sgmcmc.chain.by_coordinate import is_drawn, rates_of, update_
from torch_sgmcmc.chain.correlated_noise import (
    checked_covariance,
    correlated,
    noise_factor,
)
from torch_sgmcmc.chain.dtypes import has_master, state_dtype
from torch_sgmcmc.chain.operators import gaussian_
from torch_sgmcmc.chain.record import Chain, Work

__all__ = [
    "COVARIANCE",
    "Factors",
    "check_saved_matrix",
    "kept_matrix",
    "move_matrix",
    "noise_of_matrix",
    "refuse_checkpoint",
    "update_with_noise",
]

#: The key of what is kept.
COVARIANCE = "gradient_noise"

# ---- In the state -----------------------------------------------------------------


def kept_matrix(chain: Chain, covariance: Tensor) -> dict[str, Tensor]:
    """What is kept of a covariance: a copy.

    Raises:
        ValueError: it is not of the shape, finite and symmetric, or the sampler can
            have none.
    """
    params = chain.params
    _check_takes_matrix(chain, params)
    what = "Invalid gradient covariance: it"
    copy = checked_covariance(what, covariance, _size(params), _device(params))
    return {"covariance": copy}


def check_saved_matrix(chain: Chain, state: Mapping[Any, Any]) -> None:
    """Raises if the matrix of a saved state, if it has one, is none for the sampler."""
    kept = state.get(COVARIANCE)
    if kept is None:
        return
    matrix = kept.get("covariance") if isinstance(kept, Mapping) else None
    if not isinstance(matrix, Tensor) or len(kept) > 1:
        raise ValueError(
            f"Invalid state_dict: {COVARIANCE} (must be a dict of covariance, a Tensor)"
        )
    params = chain.params
    _check_takes_matrix(chain, params)
    what = f"Invalid state_dict: {COVARIANCE}"
    checked_covariance(what, matrix, _size(params), _device(params))


def move_matrix(chain: Chain) -> None:
    """Copies the matrix, if there is one, to where the parameters are."""
    if COVARIANCE in chain.state:
        matrix = chain.state[COVARIANCE]["covariance"]
        device = _device(chain.params)
        copy = matrix.to(device=device, dtype=torch.float64, copy=True)
        chain.state[COVARIANCE] = {"covariance": copy}


def refuse_checkpoint(chain: Chain) -> None:
    """Raises if there is a matrix, and torch.distributed.checkpoint asks for state."""
    if COVARIANCE in chain.state and distributed.called_from(distributed.CHECKPOINT):
        raise RuntimeError(
            "SGHMC has a gradient covariance over all parameters, which "
            "get_optimizer_state_dict cannot hold: save its state_dict() with "
            "torch.save"
        )


def _check_takes_matrix(chain: Chain, params: list[Tensor]) -> None:
    wrong = None
    if not chain.placement.is_whole:
        wrong = "parameters that are DTensors"
    elif chain.groups[0]["num_chains"] is not None:
        wrong = "num_chains"
    elif len({p.device for p in params}) > 1:
        wrong = "parameters on several devices"
    if wrong is not None:
        raise ValueError(
            f"Invalid gradient covariance: a matrix excludes {wrong} (give the "
            "variance of each coordinate)"
        )


# ---- A step -----------------------------------------------------------------------


class Factors:
    """The noise's Cholesky factors, for where momenta are drawn and where not."""

    def __init__(self) -> None:
        self.known: dict[tuple[bool, ...], tuple[Any, Tensor]] = {}


def noise_of_matrix(
    chain: Chain, work: list[Work], factors: Factors
) -> list[list[Tensor]]:
    """The noise of a step beside a matrix, for each list."""
    for group, *_ in work:
        if group["noise_estimate"] != "given":
            raise ValueError(
                f"Invalid noise_estimate: {group['noise_estimate']!r} (must be "
                "'given' in all groups beside a matrix over all coordinates; "
                "set_gradient_variance(None) removes it)"
            )
    factor = _factor(chain, work, factors)
    noises = [_white(chain, lists, _C.Purpose.UPDATE) for lists in work]
    all_noises = list(chained(*noises))
    white = torch.cat([w.to(torch.float64).flatten() for w in all_noises])
    parts = correlated(factor, white).split([w.numel() for w in all_noises])
    for noise, part in zip(all_noises, parts, strict=True):
        noise.copy_(part.view(noise.shape))
    return noises


def update_with_noise(
    chain: Chain, lists: Work, prepared: list[list[Tensor]], noises: list[Tensor]
) -> None:
    """The update of a list with its part of :func:`noise_of_matrix`."""
    group, params, grads, _ = lists
    momenta, _, masters = prepared
    drawn: list[Any] = [None] * len(params)
    if is_drawn(group):
        drawn = _white(chain, lists, _C.Purpose.MOMENTUM)
    places = iter(masters)
    for i, p in enumerate(params):
        state = chain.state[p]
        theta = next(places) if has_master(p) else p
        mean = state.get("prior_mean", group["prior_mean"])
        rates = rates_of(group, state, p, theta.dtype)
        update_(
            *(group, rates, theta, mean),
            *(grads[i], momenta[i], noises[i], drawn[i]),
        )
        if theta is not p:
            p.copy_(theta)


def _white(chain: Chain, lists: Work, purpose: int) -> list[Tensor]:
    """Standard normals for the parameters of a list."""
    group, params, _, offsets = lists
    out = [torch.zeros_like(p, dtype=state_dtype(p)) for p in params]
    arguments = chain.noise(group)
    gaussian_(out, std=1.0, offsets=offsets, purpose=purpose, **arguments)
    return out


def _factor(chain: Chain, work: list[Work], factors: Factors) -> Tensor:
    """The noise's factor, of those coordinates that have a gradient."""
    covariance = chain.state[COVARIANCE]["covariance"]
    params = chain.params
    if len(covariance) != _size(params):
        raise RuntimeError(
            f"SGHMC has a gradient covariance over {len(covariance)} coordinates, "
            f"and its parameters have {_size(params)}: call "
            "set_gradient_covariance() anew"
        )
    here = [(group, p) for group, of_group, _, _ in work for p in of_group]
    drawn = tuple(is_drawn(group) for group, *_ in work)
    version = 0 if covariance.is_inference() else covariance._version
    made_of = version, [(id(p), _numbers(group)) for group, p in here]
    known = factors.known.get(drawn)
    if known is not None and known[0] == made_of:
        return known[1]
    begins, begin = {}, 0
    for p in params:
        begins[p] = begin
        begin += p.numel()
    index = torch.cat(
        [torch.arange(begins[p], begins[p] + p.numel()) for _, p in here]
    ).to(covariance.device)
    frictions, scales, heats = [], [], []
    for group, p in here:
        rates = rates_of(group, chain.state[p], p, torch.float64)
        friction, lr = (rate.flatten() for rate in rates)
        heat = group["temperature"] / group["num_data"]
        scale = (lr / (2 * heat)).sqrt()
        if is_drawn(group):
            scale *= (2 - friction).reciprocal()
        frictions.append(friction)
        scales.append(scale)
        heats.append(lr * (2 * heat))
    factor = noise_factor(
        torch.cat(frictions), torch.cat(scales), covariance[index][:, index]
    )
    factor = torch.cat(heats).sqrt()[:, None] * factor
    factors.known[drawn] = made_of, factor
    return factor


def _numbers(group: dict[str, Any]) -> list[float]:
    """What the noise of a group's coordinates depends on."""
    return [group[name] for name in ("lr", "momentum", "num_data", "temperature")]


def _size(params: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in params)


def _device(params: list[Tensor]) -> torch.device:
    return params[0].device if params else torch.device("cpu")
