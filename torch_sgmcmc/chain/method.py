"""An operator that updates parameters, as a step uses its row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain import operators
from torch_sgmcmc.chain.dtypes import blank, state_dtype
from torch_sgmcmc.chain.master import start_masters
from torch_sgmcmc.chain.momentum import start_momenta
from torch_sgmcmc.chain.prior import PRIOR_MEAN, means_of
from torch_sgmcmc.chain.record import Chain, Work

__all__ = ["Method"]


class Method:
    """An operator with a row (``csrc/core/row.h``).

    Args:
        operator: its name.
    """

    def __init__(self, operator: str) -> None:
        row = operators.ROWS[operator]
        self.operator = getattr(operators, operator)
        #: Where the row stands among all.
        self.place = [*operators.ROWS].index(operator)
        self._numbers = [
            (each["name"], each["default"])
            for each in (*row["numbers"], *row["common"])
        ]
        self._integers = {n["name"] for n in row["numbers"] if n["is_integer"]}
        own = {each["key"]: each["start"] for each in row["lists"] if each["key"]}
        #: The keys of the state that begins as the row says, and how.
        self.starts: Mapping[str, str] = {k: how for k, how in own.items() if how}
        #: All that is kept of a parameter.
        self.state: Mapping[str, type] = dict.fromkeys((*own, PRIOR_MEAN), Tensor)

    def blank_state(self, p: Tensor) -> dict[str, Any]:
        """See ``Sampler._blank_state``."""
        return blank(p, *self.starts)

    def prepare(self, chain: Chain, work: Work) -> list[list[Tensor]]:
        """Begins state that is not there; returns its lists and the masters.

        State that begins by code is for the sampler's own ``_prepare``.
        """
        group, params, _, offsets = work
        lists = []
        for key, how in self.starts.items():
            if how == "stationary":
                start_momenta(chain, group, params, offsets)
            else:
                _start_zeros(chain, params, key)
            lists.append([chain.state[p][key] for p in params])
        lists.append(start_masters(chain, params))
        return lists

    def numbers(self, group: Mapping[str, Any]) -> list[float]:
        """Returns the group's numbers in the row's order; defaults of what it lacks."""
        return [group.get(name, default) for name, default in self._numbers]

    def update(
        self,
        chain: Chain,
        work: Work,
        lists: list[list[Tensor]],
        device_step: Tensor,
        instead: Mapping[str, Any],
    ) -> None:
        """Calls the operator by its name, for torch.compile to trace."""
        group, params, grads, offsets = work
        group = {**group, **instead}
        numbers = {
            name: int(value) if name in self._integers else value
            for (name, _), value in zip(self._numbers, self.numbers(group), strict=True)
        }
        self.operator(
            *(params, grads, *lists),
            **numbers,
            offsets=offsets,
            prior_means=means_of(chain.state, params),
            **{**chain.noise(), "step": 0, "device_step": device_step},
        )


def _start_zeros(chain: Chain, params: list[Tensor], key: str) -> None:
    for p in params:
        if key not in chain.state[p]:
            chain.create(p, key, torch.zeros_like(p, dtype=state_dtype(p)))
