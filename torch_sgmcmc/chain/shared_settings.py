"""Samplers whose param groups move as one: what these share, in one place."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from torch_sgmcmc.chain.prior import PRIOR_MEAN
from torch_sgmcmc.sampler import Sampler

__all__ = ["SharedSettings"]

# What groups may have each for itself, unless a sampler says otherwise.
_OF_GROUP = ("prior_precision", PRIOR_MEAN)


class SharedSettings(Sampler):
    """A sampler that makes one decision for all param groups, on the host.

    A subclass names in ``_SHARED`` the hyperparameters that must be equal in all groups
    (a group cannot set them), unless these are all but the prior's, and in
    ``_PROGRESS`` what it counts.
    """

    _CAPTURABLE: ClassVar[bool] = False
    # GradScaler.step() then leaves a mark on the sampler, by which step() sees it.
    _step_supports_amp_scaling = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "_SETTINGS" in own and "_SHARED" not in own:
            names = (row.name for row in cls._SETTINGS)
            cls._SHARED = tuple(name for name in names if name not in _OF_GROUP)
        managed = (*Sampler._MANAGED, *cls._SHARED, *cls._PROGRESS)
        cls._MANAGED = (*managed, *cls._RECORDS)

    def _set(self, **values: Any) -> None:
        """Sets what all groups share: hyperparameters, and what is counted."""
        progress = {k: v for k, v in values.items() if k in self._PROGRESS}
        self._rng.set_progress(self.param_groups, **progress)
        for group in self.param_groups:
            group.update(values)

    def _forget(self, p: Tensor, name: str) -> None:
        """Takes something out of a parameter's state."""
        state = self.state.get(p, {})
        state.pop(name, None)
        if not state:
            self.state.pop(p, None)

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]
