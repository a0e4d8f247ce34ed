"""Steps that a chain makes only to be looked at, and that leave no trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_sgmcmc.core import distributed
from torch_sgmcmc.core.absence import Absences
from torch_sgmcmc.core.nonfinite import catch_up
from torch_sgmcmc.core.turns import repeats_on_purpose
from torch_sgmcmc.seeds import fold_in

if TYPE_CHECKING:
    from torch_sgmcmc.sampler import Sampler

__all__ = ["Place", "rehearsal"]

# A stream of noise that the chain itself does not use.
_STREAM = 0x74756E65


class Place:
    """Where a chain is: copies of its parameters and of what is kept of them.

    And its lrs, which momenta belong to.
    """

    def __init__(self, sampler: Sampler) -> None:
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
def rehearsal(sampler: Sampler) -> Iterator[None]:
    """Has the sampler make steps for a while that it has not made afterwards.

    Noise is that of another seed, hooks and gauges are not called, and steps with
    gradients that are not finite are left out. Afterwards parameters, gradients, state,
    settings, counters and torch's default generators are as before, whatever is raised.
    """
    # What a first step would do, and is to last.
    sampler._clear_blank_state()
    sampler._is_settled = distributed.settle(sampler)
    groups = sampler.param_groups
    params = [p for group in groups for p in group["params"]]
    saved = [dict(group) for group in groups]
    state = dict(sampler.state)
    grads = [p.grad for p in params]
    place = Place(sampler)
    known = sampler.__dict__
    names = ("_gauges", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    names = (
        *names,
        "_turn",
        "_turn_of",
        "_warned",
        "_absences",
        "_shared_noise_said",
        "_left_out",
    )
    attributes = {name: known[name] for name in names if name in known}
    devices = sorted({p.device.index for p in params if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        try:
            place.restore()  # what is in the state is a copy from here on
            sampler._gauges = None
            sampler._absences = Absences(says=False)
            sampler._left_out = None  # steps may well be
            repeats_on_purpose(sampler)
            sampler._optimizer_step_pre_hooks = OrderedDict()
            sampler._optimizer_step_post_hooks = OrderedDict()
            seed = fold_in(groups[0]["seed"], _STREAM)
            for group in groups:
                group.update(seed=seed, nonfinite="skip")
            sampler._note()
            yield
        finally:
            catch_up(sampler)
            sampler._error = None
            place.restore()
            sampler.state.clear()
            sampler.state.update(state)
            for group, kept in zip(groups, saved, strict=True):
                group.clear()
                group.update(kept)
            sampler._note()
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            for name in names:
                known.pop(name, None)
            known.update(attributes)


def _copy(kept: Any) -> Any:
    if not isinstance(kept, dict):
        return kept
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept.items()}
