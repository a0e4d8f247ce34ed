"""What users gave of a parameter, and so is in its state before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch_sgmcmc.chain.prior import PRIOR_MEAN, complete_means

__all__ = [
    "MASS",
    "PRECONDITIONER",
    "complete_given",
    "given",
    "has_more",
]

#: The key of SBPS's A.
PRECONDITIONER = "preconditioner"
#: That of HMC's M.
MASS = "mass"


def given(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a parameter's state that a user gave."""
    keys = [PRIOR_MEAN, MASS]
    if "square_average" not in state:  # which A is made of where it is learned
        keys.append(PRECONDITIONER)
    return {key: state[key] for key in keys if key in state}


def complete_given(
    groups: Iterable[dict[str, Any]], state: Any, before: Mapping[Any, Any]
) -> None:
    """Gives a loaded state what it may lack of parameters that do not move.

    torch.distributed.checkpoint leaves these out.
    """
    complete_means(groups, state, before)
    for key in (PRECONDITIONER, MASS):
        if not any(key in given(kept) for kept in state.values()):
            continue
        for p, kept in before.items():
            if key in given(kept) and not p.requires_grad:
                state[p].setdefault(key, kept[key])


def has_more(state: Mapping[str, Any]) -> bool:
    """Whether a parameter has other state."""
    return len(state) > len(given(state))
