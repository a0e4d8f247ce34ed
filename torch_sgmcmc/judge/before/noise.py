"""Limits of lr: stability, and the heat of minibatch noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from torch_sgmcmc.baoa import BAOA
from torch_sgmcmc.chain.dtypes import state_dtype
from torch_sgmcmc.chain.group_settings import noise_estimate
from torch_sgmcmc.ewsg import EWSG
from torch_sgmcmc.psgld import PSGLD
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sghmc import SGHMC
from torch_sgmcmc.sgld import SGLD
from torch_sgmcmc.sglrw import SGLRW
from torch_sgmcmc.sgnht import SGNHT

__all__ = ["is_heat_known", "mean_heat", "noise_heat", "stable_lr"]


def stable_lr(sampler: Sampler, curvature: float) -> float:
    """Returns the largest group's lr at which this curvature is stable.

    NaN for samplers without a known limit: pSGLD, HMC and SBPS.
    """
    if isinstance(sampler, BAOA) and curvature > 0:
        return 4 / curvature
    if not isinstance(sampler, SGLD | SGLRW | SGHMC | SGNHT | EWSG) or curvature <= 0:
        return math.nan
    return min(
        2 * (1 + group.get("momentum", 0.0)) / curvature
        for group in sampler.param_groups
    )


def is_heat_known(sampler: Sampler) -> bool:
    """Returns whether a closed form gives the heat of this sampler's settings."""
    for group in sampler.param_groups:
        if not group["temperature"] > 0:
            return False
        if isinstance(group.get("noise_estimate", 0.0), str):
            return False
        if isinstance(sampler, PSGLD) and (
            group["adapt"]
            or any(
                p.requires_grad and "square_average" not in sampler.state.get(p, {})
                for p in group["params"]
            )
        ):
            return False
    return isinstance(sampler, SGLD | SGHMC | BAOA | PSGLD)


def noise_heat(
    sampler: Sampler, grads: Sequence[Sequence[Tensor | None]]
) -> list[float]:
    """Returns T_kin / T - 1 of each tensor, by the noise of minibatches' gradients.

    lr N V / (2 (1 - m) T) less what the noise estimate removes, V = ‖g₁ - g₂‖² / (2d)
    in the mean over pairs; NaN without gradients. It is proportional to lr.
    """
    heats = []
    ours = [(group, p) for group in sampler.param_groups for p in group["params"]]
    for (group, p), each in zip(ours, zip(*grads, strict=True), strict=True):
        if any(g is None for g in each) or p.numel() == 0:
            heats.append(math.nan)
            continue
        variance, pairs = 0.0, [*zip(each[::2], each[1::2], strict=True)]
        for a, b in pairs:
            weighted = difference = b.to(state_dtype(p)) - a.to(state_dtype(p))
            if "square_average" in sampler.state.get(p, {}):
                root = sampler.state[p]["square_average"].sqrt()
                weighted = difference / (root + group["eps"])
            square = float((difference * weighted).detach().double().sum())
            variance += square / (2 * p.numel() * len(pairs))
        kept = 1 - group.get("momentum", 0.0)
        heat = group["lr"] * group["num_data"] * variance / (2 * group["temperature"])
        taken = noise_estimate(group) if "noise_estimate" in group else 0.0
        # BAOA's friction is 2 (1 - m) / (1 + m).
        factor = (2 - kept) / 2 if isinstance(sampler, BAOA) else 1.0
        heats.append(factor * float(heat - taken) / kept)
    return heats


def mean_heat(heats: Sequence[float], params: Sequence[Tensor]) -> float:
    """Returns the heat of the mean coordinate of tensors with gradients."""
    known = [
        (heat * p.numel(), p.numel())
        for heat, p in zip(heats, params, strict=True)
        if not math.isnan(heat)
    ]
    total = sum(size for _, size in known)
    return sum(heat for heat, _ in known) / total if total else math.nan
