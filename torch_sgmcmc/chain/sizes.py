"""Parameters that are not as their noise is numbered, and numbers for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_sgmcmc.chain import numbering
from torch_sgmcmc.chain.numbering import SIZES
from torch_sgmcmc.chain.parameters import check_memory
from torch_sgmcmc.chain.record import Chain

__all__ = ["check_sizes", "renumber", "unlike"]


def unlike(chain: Chain, group: dict[str, Any]) -> RuntimeError:
    """The error of a step with parameters that are not as they were numbered."""
    params, sizes = group["params"], group[SIZES]
    at = next(i for i, g in enumerate(chain.groups) if g["params"] is params)
    if len(params) != len(sizes):
        what = f"{len(params)} parameters in group {at}, whose noise is numbered for "
        what += f"{len(sizes)}"
    else:
        now = map(chain.numel, params)
        i, new, old = next(
            (i, new, old)
            for i, (new, old) in enumerate(zip(now, sizes, strict=True))
            if new != old
        )
        what = f"a parameter of {new} elements, number {i} of group {at}, whose noise "
        what += f"is numbered for {old}"
    return RuntimeError(
        f"{chain.name} got {what}: call renumber() after parameters have grown, shrunk "
        "or been replaced (further ones come with add_param_group)"
    )


def check_sizes(chain: Chain) -> None:
    """Raises if parameters are not as their noise is numbered."""
    for group in chain.groups:
        if [chain.numel(p) for p in group["params"]] != group[SIZES]:
            raise unlike(chain, group)


def renumber(chain: Chain, check: Callable[[Tensor], None]) -> bool:
    """See :meth:`Sampler.renumber`; returns whether something has changed."""
    params = chain.params
    if len({id(p) for p in params}) < len(params):
        raise ValueError("Invalid parameters: one is listed twice")
    for p in params:
        check(p)
        for key, value in chain.state.get(p, {}).items():
            if isinstance(value, Tensor) and value.shape != p.shape:
                raise ValueError(
                    f"Invalid state: {key} of shape {list(value.shape)} for a "
                    f"parameter of shape {list(p.shape)} (put one of its shape into "
                    f"state[p][{key!r}], or delete it to begin anew)"
                )
    check_memory(group["params"] for group in chain.groups)
    changed = numbering.renumber(chain.groups, chain.numel)
    known = set(params)
    for p in [p for p in chain.state if isinstance(p, Tensor) and p not in known]:
        del chain.state[p]
        changed = True
    return changed
