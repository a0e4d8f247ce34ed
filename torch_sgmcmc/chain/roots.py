"""Square roots that are the same on every processor."""

from __future__ import annotations

from torch import Tensor

from torch_sgmcmc.chain.operators import square_root_
from torch_sgmcmc.chain.record import Chain

__all__ = ["root"]


def root(chain: Chain, tensor: Tensor) -> Tensor:
    """The square root of what a chain is made of, correctly rounded.

    torch's own on a CPU are a unit in the last place off at up to a fifth of all
    numbers, at others on each maker's processors, and at none on a GPU.
    """
    roots = tensor.detach().clone()
    chain.placement.without_noise(square_root_)([roots])
    return roots
