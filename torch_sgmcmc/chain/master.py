"""Parameters in bf16 and fp16: the chain runs on a master of each in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_sgmcmc.chain.dtypes import has_master, state_dtype
from torch_sgmcmc.chain.record import Chain

__all__ = ["check_not_capturing", "start_masters"]


def check_not_capturing(sampler: str, p: Tensor, what: str) -> None:
    """Raises if state would be created inside of a CUDA graph."""
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{sampler} must make one step before it is captured in a CUDA graph: a "
            f"parameter has no {what} yet"
        )


def start_masters(chain: Chain, params: list[Tensor]) -> list[Tensor]:
    """Gives a master to the parameters in bf16 and fp16 that have none yet.

    Returns:
        The masters, in the order of their parameters, as the operators take them.
    """
    masters = []
    for p in params:
        if has_master(p):
            state = chain.state[p]
            if "master" not in state:
                check_not_capturing(chain.name, p, "master")
                chain.create(p, "master", p.detach().to(state_dtype(p)))
            masters.append(state["master"])
    return masters
