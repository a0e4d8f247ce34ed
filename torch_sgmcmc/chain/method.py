"""What a step makes of the row of an operator that updates parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain import operators
from torch_sgmcmc.chain.dtypes import blank, state_dtype
from torch_sgmcmc.chain.master import start_masters
from torch_sgmcmc.chain.momentum import start_momenta
from torch_sgmcmc.chain.prior import PRIOR_MEAN, means_of
from torch_sgmcmc.chain.record import Chain, Work

__all__ = ["Method"]


class Method:
    """An operator with a row (``csrc/core/row.h``), as a step uses it.

    Args:
        operator: its name.
    """

    def __init__(self, operator: str) -> None:
        row = operators.ROWS[operator]
        self.operator = getattr(operators, operator)
        self._place = [*operators.ROWS].index(operator)
        self._numbers = [*row["numbers"], *row["common"]]
        self._call = _compiled(self._numbers)
        own = {each["key"]: each["start"] for each in row["lists"] if each["key"]}
        #: The keys of the state that begins as the row says, and how.
        self.starts: Mapping[str, str] = {k: how for k, how in own.items() if how}
        #: Whether the first step of a parameter creates state, but for a master.
        self.keeps_state = bool(own.keys() - {"master"})
        #: All that is kept of a parameter.
        self.state: Mapping[str, type] = dict.fromkeys((*own, PRIOR_MEAN), Tensor)

    def blank_state(self, p: Tensor) -> dict[str, Any]:
        """See ``Sampler._blank_state``."""
        return blank(p, *self.starts)

    def prepare(
        self,
        chain: Chain,
        work: Work,
    ) -> list[list[Tensor]]:
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

    def update(
        self,
        chain: Chain,
        work: Work,
        lists: list[list[Tensor]],
        **instead: Any,
    ) -> None:
        """Calls the operator with the group's numbers, but for those given instead."""
        group, params, grads, offsets = work
        if instead:
            group = {**group, **instead}
        self._call(
            chain.placement.updating(self.operator),
            (params, grads, *lists),
            group,
            offsets,
            means_of(chain.state, params),
            chain.noise(group),
        )

    def packed(
        self,
        chain: Chain,
        work: Work,
        lists: list[list[Tensor]],
        *,
        looks: bool,
        **instead: Any,
    ) -> tuple[list[Tensor], Tensor]:
        """What ``step_again_`` is given of :meth:`update`'s arguments.

        With ``looks`` it is to look whether gradients are finite.

        Returns:
            The lists and the prior's means in one list, and all that is not a tensor.
        """
        group, params, _, offsets = work
        means = means_of(chain.state, params)
        group = {**group, **instead}
        memory = _C.packed_call(
            row=self._place,
            looks=looks,
            seed=group["seed"],
            num_chains=chain.noise(group).get("num_chains", 0),
            has_means=means is not None,
            lengths=[*map(len, lists)],
            offsets=offsets,
            numbers=[group.get(n["name"], n["default"]) for n in self._numbers],
        )
        state = [tensor for each in (*lists, means or ()) for tensor in each]
        return state, torch.frombuffer(memory, dtype=torch.int64)


def _start_zeros(chain: Chain, params: list[Tensor], key: str) -> None:
    for p in params:
        if key not in chain.state[p]:
            chain.create(p, key, torch.zeros_like(p, dtype=state_dtype(p)))


def _compiled(numbers: list[dict[str, Any]]) -> Callable[..., None]:
    """A call of an operator with numbers of a group, as if it were written out.

    A step of a small network is little more than this call, and a dict of numbers would
    be a tenth of it. What a group lacks is at its default.
    """
    defaults = {
        each["name"]: (int if each["is_integer"] else float)(each["default"])
        for each in numbers
        if not math.isnan(each["default"])
    }
    named = ", ".join(
        f"{name}=group.get({name!r}, defaults[{name!r}])"
        if name in defaults
        else f"{name}=group[{name!r}]"
        for name in (each["name"] for each in numbers)
    )
    return eval(
        "lambda operator, lists, group, offsets, means, step: "
        f"operator(*lists, {named}, offsets=offsets, prior_means=means, **step)",
        {"defaults": defaults},
    )
