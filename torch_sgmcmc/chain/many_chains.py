"""Many chains in one process: each is the chain that would run alone.

Note [Chains with seeds of their own]
With ``num_chains=K`` every parameter has a leading dimension of K chains, as
:func:`torch.func.stack_module_state` makes them. Elements are numbered as those of one
chain, and chain k draws its noise with the seed ``fold_in(seed, k)`` (Note [Chains side
by side], csrc/apply/plan.h): it is, bit for bit, the chain of a sampler with that seed
that gets chain k's gradients. Nothing is decided together but what stops all: a step
that is left out is left out for every chain.
"""

from __future__ import annotations

from typing import ClassVar

from torch_sgmcmc.sampler import Sampler

__all__ = ["ManyChains"]


class ManyChains(Sampler):
    """A sampler that goes by gradients alone, of which many chains can run at once."""

    _CHAINS_HAVE_SEEDS: ClassVar[bool] = True
    _SHARED: ClassVar[tuple[str, ...]] = ("num_chains",)
    _MANAGED: ClassVar[tuple[str, ...]] = (*Sampler._MANAGED, "num_chains")
