"""What gauges sum along one trajectory of HMC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from torch_sgmcmc.chain.operators import gauge_sums

__all__ = ["Moving", "TrajectoryHeat"]

_MOMENTUM = 2  # a kind of csrc/methods/gauge.h: x · g, v · v, x · v


class Moving(NamedTuple):
    """Some parameters on a trajectory, by lists."""

    params: list[Tensor]
    grads: list[Tensor]
    positions: list[Tensor]  # in the type of arithmetic
    momenta: list[Tensor]
    masses: list[Tensor]  # empty: all are 1
    prior: dict[str, Any]  # arguments of gauge_sums


class TrajectoryHeat:
    """Weighted sums over the leapfrog steps (csrc/host/trajectory_heat.h).

    Args:
        centers_of: the centers of parameters, or an empty list.
    """

    def __init__(self, centers_of: Callable[[list[Tensor]], list[Tensor]]) -> None:
        self._centers_of = centers_of
        self._forces: dict[int, Tensor] = {}
        self._heats: dict[int, Tensor] = {}

    def look(
        self,
        moving: list[Moving],
        *,
        force: float = 0.0,
        heat: float = 0.0,
        turn: float = 0.0,
    ) -> None:
        """Adds force x · g to one sum, and heat r · M⁻¹ r + turn x · r to the other."""
        for i, lists in enumerate(moving):
            # HMC-ECS's rows are flat and in float64, whatever the parameters are.
            centers = [
                c.reshape(x.shape).to(x.dtype)
                for c, x in zip(
                    self._centers_of(lists.params), lists.positions, strict=False
                )
            ]
            momenta = lists.momenta
            if heat != 0 and lists.masses:
                momenta = [
                    r * m.rsqrt() for r, m in zip(momenta, lists.masses, strict=True)
                ]
            sums = gauge_sums(
                *(lists.grads, lists.positions, centers, momenta, []),
                kind=_MOMENTUM,
                decay=1.0,
                eps=0.0,
                **lists.prior,
            )
            for total, weight, column in (
                (self._forces, force, 0),
                (self._heats, heat, 1),
                (self._heats, turn, 2),
            ):
                if weight != 0:
                    part = sums[:, column] * weight
                    total[i] = total[i] + part if i in total else part

    def sums(self, index: int) -> list[tuple[tuple[int, ...], Tensor]]:
        """Of a list's tensors, by place among the host's sums."""
        forces, heats = self._forces[index], self._heats[index]
        return [((0,), forces[:, None]), ((2,), heats[:, None])]
