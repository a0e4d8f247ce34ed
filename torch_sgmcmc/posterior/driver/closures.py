"""The closure that a sampler's step calls, from a loss of a minibatch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torch_sgmcmc.ewsg import EWSG
from torch_sgmcmc.hmc import HMC
from torch_sgmcmc.hmcecs import HMCECS
from torch_sgmcmc.psgld import needs_graph
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sbps import SBPS

__all__ = ["closure_of", "one_gradient_a_step"]


def one_gradient_a_step(sampler: Sampler) -> bool:
    """Whether each step takes one minibatch."""
    return not isinstance(sampler, EWSG | HMC | HMCECS | SBPS)


def closure_of(
    sampler: Sampler, loss: Callable[[], Tensor]
) -> Callable[[], Tensor | float]:
    """What the step of any sampler but HMCECS is to be called with.

    ``loss()`` draws a minibatch, and returns its mean loss, of each example for SBPS.
    """
    if isinstance(sampler, HMCECS):
        raise TypeError(
            "Invalid sampler: HMCECS draws its own subsamples by index (make a loop of "
            "its steps, and collect with Collector)"
        )
    if isinstance(sampler, SBPS):
        return loss

    def backward() -> Tensor:
        if one_gradient_a_step(sampler):  # others see to it
            sampler.zero_grad()
        value = loss()
        value.backward(create_graph=needs_graph(sampler))
        return value.detach()

    return backward
