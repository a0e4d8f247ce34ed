"""Steps that a chain makes only to be looked at, and that leave no trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_sgmcmc.chain.absence import Absences
from torch_sgmcmc.chain.distributed import settle
from torch_sgmcmc.chain.nonfinite import catch_up
from torch_sgmcmc.chain.record import chain_of
from torch_sgmcmc.seeds import fold_in

__all__ = ["Place", "rehearsal"]

# A stream of noise that the chain itself does not use.
_STREAM = 0x74756E65
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Place:
    """Where a chain is: copies of its parameters and of what is kept of them.

    And its lrs, which momenta belong to.
    """

    def __init__(self, sampler: Optimizer) -> None:
        self._sampler = sampler
        self._params = [p for group in sampler.param_groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self._params]
        self._lrs = [group["lr"] for group in sampler.param_groups]
        self._state = {p: _copy(kept) for p, kept in sampler.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the chain back, with copies again."""
        for p, value in zip(self._params, self._values, strict=True):
            p.copy_(value)
        for group, lr in zip(self._sampler.param_groups, self._lrs, strict=True):
            group["lr"] = lr
        state = self._sampler.state
        state.clear()
        state.update({p: _copy(kept) for p, kept in self._state.items()})


@contextmanager
def rehearsal(sampler: Optimizer) -> Iterator[None]:
    """Has the sampler make steps for a while that it has not made afterwards.

    Noise is that of another seed, hooks and gauges are not called, and steps with
    gradients that are not finite are left out. Afterwards parameters, gradients, state,
    settings, counters and torch's default generators are as before, whatever is raised.
    """
    chain = chain_of(sampler)
    groups, params = chain.groups, chain.params
    # What a first step would do, and is to last.
    chain.clear_blank_state()
    chain.is_settled = settle(chain)
    if chain.is_settled:
        sampler.defaults["seed"] = groups[0]["seed"]
    saved = [dict(group) for group in groups]
    state = dict(sampler.state)
    grads = [p.grad for p in params]
    place = Place(sampler)
    hooks = {name: getattr(sampler, name) for name in _HOOKS}
    devices = sorted({p.device.index for p in params if p.device.type == "cuda"})
    present = chain.saved()
    with torch.random.fork_rng(devices):
        try:
            place.restore()  # what is in the state is a copy from here on
            chain.gauges = None
            chain.absences = Absences(says=False)
            chain.left_out = None  # steps may well be
            chain.shared_noise_said = True  # the seed is used again by design
            for name in _HOOKS:
                setattr(sampler, name, OrderedDict())
            seed = fold_in(groups[0]["seed"], _STREAM)
            for group in groups:
                group.update(seed=seed, nonfinite="skip")
            chain.ledger.note(groups)
            yield
        finally:
            catch_up(chain)
            place.restore()
            sampler.state.clear()
            sampler.state.update(state)
            for group, kept in zip(groups, saved, strict=True):
                group.clear()
                group.update(kept)
            chain.restore(present)
            chain.ledger.note(groups)
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            for name, own in hooks.items():
                setattr(sampler, name, own)


def _copy(kept: Any) -> Any:
    if not isinstance(kept, dict):
        return kept
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept.items()}
