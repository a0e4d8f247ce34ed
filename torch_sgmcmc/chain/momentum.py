"""The first momenta."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.dtypes import state_dtype
from torch_sgmcmc.chain.group_settings import scales
from torch_sgmcmc.chain.master import check_not_capturing
from torch_sgmcmc.chain.operators import gaussian_
from torch_sgmcmc.chain.record import Chain

__all__ = ["draw_stationary", "start_momenta"]


def start_momenta(
    chain: Chain,
    group: dict[str, Any],
    params: list[Tensor],
    offsets: list[int],
    *,
    stationary: bool = True,
) -> None:
    """Gives a momentum to those parameters that have none yet.

    It is drawn from its stationary law N(0, lr T / N), or zero.
    """
    new = [i for i, p in enumerate(params) if "momentum" not in chain.state[p]]
    if not new:
        return
    params = [params[i] for i in new]
    check_not_capturing(chain.name, params[0], "momentum")
    momenta = draw_stationary(
        chain, group, params, [offsets[i] for i in new], stationary=stationary
    )
    for p, momentum in zip(params, momenta, strict=True):
        chain.create(p, "momentum", momentum)


def draw_stationary(
    chain: Chain,
    group: dict[str, Any],
    params: list[Tensor],
    offsets: list[int],
    *,
    stationary: bool = True,
) -> list[Tensor]:
    """Returns momenta drawn from N(0, lr T / N), or zeros.

    Beside momenta of other settings, all of which the update multiplies, they are drawn
    for those settings.
    """
    momenta = [torch.zeros_like(p, dtype=state_dtype(p)) for p in params]
    if stationary:
        heat = float(group["lr"]) * group["temperature"] / group["num_data"]
        chain.placement.updating(gaussian_)(
            momenta,
            std=math.sqrt(heat) / scales(group).get("momentum_scale", 1.0),
            offsets=offsets,
            purpose=_C.Purpose.MOMENTUM,
            **chain.noise(),
        )
    return momenta
