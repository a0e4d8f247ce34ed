"""The base class of samplers that make one decision for all param groups."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.core.sampler import Sampler


class SharedSettings(Sampler):
    """A sampler that makes one decision for all param groups, on the host.

    Its spec has ``needs_closure``, and names its counters and shared hyperparameters.
    """

    # GradScaler.step() then marks the sampler, and step() detects the mark.
    _step_supports_amp_scaling = True

    def _begin_step(self) -> None:
        super()._begin_step()
        context = context_of(self)
        context.clear_blank_state()
        context.link_step()
        context.keep_created()

    def _set(self, **values: Any) -> None:
        progress = {k: v for k, v in values.items() if k in self._SPEC.progress}
        self._context.rng.set_progress(self.param_groups, **progress)
        for group in self.param_groups:
            group.update(values)

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]
