"""Parameters in bf16 and fp16: the chain runs on a master of each in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_sgmcmc.core.momentum import check_not_capturing, state_dtype

if TYPE_CHECKING:
    from torch_sgmcmc.sampler import Sampler

__all__ = ["has_master", "start_masters"]


def has_master(p: Tensor) -> bool:
    """Whether a parameter is the rounded value of a master.

    See Note [Master parameters] in ``csrc/core/roles.h``.
    """
    dtype = p.dtype
    return dtype is torch.bfloat16 or dtype is torch.float16


def start_masters(sampler: Sampler, params: list[Tensor]) -> list[Tensor]:
    """Gives a master to the parameters in bf16 and fp16 that have none yet.

    Returns:
        The masters, in the order of their parameters, as the operators take them.
    """
    masters = []
    for p in params:
        if has_master(p):
            state = sampler.state[p]
            if "master" not in state:
                check_not_capturing(sampler, p, "master")
                sampler._create(p, "master", p.detach().to(state_dtype(p)))
            masters.append(state["master"])
    return masters
