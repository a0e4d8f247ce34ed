"""What torch leaves undone once a checked state dict is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain import shards
from torch_sgmcmc.chain.dtypes import has_master, state_dtype
from torch_sgmcmc.chain.record import Chain

__all__ = ["finish_loading", "forget_blank_state"]


def finish_loading(chain: Chain, state_dict: Mapping[str, Any]) -> None:
    """Gives tensors their types."""
    groups = zip(state_dict["param_groups"], chain.groups, strict=True)
    for theirs, ours in groups:
        for index, p in zip(theirs["params"], ours["params"], strict=True):
            # torch casts to the parameter's dtype, and shares what need not be.
            for key, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value):
                    chain.state[p][key] = shards.like(p, value, key).to(
                        device=p.device, dtype=state_dtype(p), copy=True
                    )
            if not has_master(p):  # the chain was one in lower precision
                chain.state.get(p, {}).pop("master", None)


def forget_blank_state(
    chain: Chain, blank: Callable[[dict[str, Any], Tensor], dict[str, Any]]
) -> None:
    """Drops what a checkpoint has filled of what was blank, of a chain at its start."""
    for group in chain.groups:
        for p in group["params"]:
            state = chain.state.get(p, {})
            for key in blank(group, p):
                state.pop(key, None)
            if not state:
                chain.state.pop(p, None)
