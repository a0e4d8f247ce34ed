"""Gibbs updates of prior precisions: a hyperprior for every param group."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc._impl import dtensor
from torch_sgmcmc._impl.hyperparams import check_real
from torch_sgmcmc._impl.ops import sum_of_squares
from torch_sgmcmc._impl.state_dict import check_count, saved_number
from torch_sgmcmc._impl.user_state import away_from_mean
from torch_sgmcmc.samplers.sampler import Sampler, check_sampler

__all__ = ["GammaPrecision"]


class GammaPrecision:
    r"""A Gamma hyperprior on the prior precision of every param group.

    Used like a learning-rate scheduler: it belongs to a sampler, and each
    :meth:`step` draws every group's ``prior_precision`` λ from its full conditional
    given the group's d parameters θ that are sampled (that require a gradient). With
    λ ~ Gamma(shape a, rate b) and θ | λ ~ N(μ, I/λ),

    .. math::
        \lambda | \theta \sim
            \mathrm{Gamma}\bigl(a + \tfrac{d}{2},\;
            b + \tfrac12 \|\theta - \mu\|^2\bigr).

    At temperature T the joint density is raised to the power 1/T, which gives
    Gamma((a + d/2 - 1)/T + 1, (b + ‖θ - μ‖²/2)/T). Put each layer in a param group of
    its own to give each layer its own precision.

    Args:
        sampler: the sampler whose param groups are updated.
        shape: a > 0. Default: 1.
        rate: b > 0. Default: 1.

    Draws are keyed by the sampler's seed and a counter, ``num_updates``, so that a
    chain restored through both ``state_dict`` s continues bit for bit.

    Raises:
        ValueError: shape or rate out of range, a sampler of several chains, or, in
            :meth:`step`, T = 0.
        RuntimeError: in :meth:`step`, a parameter is not finite. No group has changed.

    Example:
        >>> groups = [{"params": layer.parameters()} for layer in layers]
        >>> sampler = SGHMC(groups, lr=0.03, momentum=0.9, num_data=50_000,
        ...                 prior_precision=1.0)
        >>> precision = GammaPrecision(sampler)
        >>> for epoch in range(epochs):
        ...     train_one_epoch(model, sampler)
        ...     precision.step()

    Reference:
        T. Chen, E. B. Fox and C. Guestrin, Stochastic Gradient Hamiltonian Monte
        Carlo, ICML 2014, section 4.2.
    """

    def __init__(
        self, sampler: Sampler, *, shape: float = 1.0, rate: float = 1.0
    ) -> None:
        check_sampler(sampler)
        if sampler.param_groups[0].get("num_chains") is not None:
            raise ValueError(
                "Invalid sampler: it has num_chains, and a group's prior_precision "
                "would be drawn for all of them (use a sampler for each chain)"
            )
        self.sampler = sampler
        self.shape = check_real("shape", shape, low_open=True)
        self.rate = check_real("rate", rate, low_open=True)
        self.num_updates = 0

    def step(self) -> list[float]:
        """Draws every group's ``prior_precision`` and returns the new values."""
        groups = self.sampler.param_groups
        for group in groups:
            check_real("temperature", group["temperature"], low_open=True)
        precisions = [self._draw(group, index) for index, group in enumerate(groups)]
        for group, precision in zip(groups, precisions, strict=True):
            group["prior_precision"] = precision
        self.num_updates += 1
        return precisions

    def _draw(self, group: dict[str, Any], index: int) -> float:
        t = group["temperature"]
        params = [p for p in group["params"] if p.requires_grad]
        dimension = sum(p.numel() for p in params)
        # Those that are on one device, and spread over the same ranks.
        together: dict[Any, list[Tensor]] = {}
        for p in params:
            away = dtensor.local(away_from_mean(self.sampler.state, group, p))
            together.setdefault((p.device, dtensor.groups_of(p)), []).append(away)
        squares = sum(
            float(dtensor.sum_over_ranks(groups, sum_of_squares(ps)))
            for (_, groups), ps in together.items()
        )
        shape = (self.shape + dimension / 2 - 1) / t + 1
        rate = (self.rate + squares / 2) / t
        if not math.isfinite(rate):
            raise RuntimeError(
                f"Cannot draw prior_precision of group {index}: the sum of squares of "
                f"its parameters is {squares}. No group has changed. Begin again with "
                "a smaller lr"
            )
        unit = _C.gamma(
            shape, seed=self.sampler.seed, step=self.num_updates, element=index
        )
        return unit / rate

    def state_dict(self) -> dict[str, Any]:
        """The counter and the hyperprior; the precisions are the sampler's."""
        return {
            "shape": self.shape,
            "rate": self.rate,
            "num_updates": saved_number(self.num_updates),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned."""
        shape = check_real("shape", state_dict["shape"], low_open=True)
        rate = check_real("rate", state_dict["rate"], low_open=True)
        num_updates = check_count("num_updates", state_dict["num_updates"])
        self.shape, self.rate, self.num_updates = shape, rate, num_updates
