"""Steps of any sampler, from per-datum losses alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_sgmcmc.hmc import HMC
from torch_sgmcmc.hmcecs import HMCECS
from torch_sgmcmc.posterior.driver.closures import closure_of
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sbps import SBPS

__all__ = ["Chain"]

# Steps of an SBPS within one interval between two samples, before something is wrong.
_MOST_EVENTS = 100_000


class Chain:
    """A sampler with a closure of its kind, which makes one move after another.

    Its parameters are [simulations, ...] each, and ``losses(indices)`` the negative
    log-likelihoods [simulations, len(indices)] of these data.
    """

    def __init__(
        self,
        sampler: Sampler,
        params: list[Tensor],
        losses: Callable[[Tensor], Tensor],
        num_data: int,
        draw_indices: Callable[[], Tensor],
    ) -> None:
        self.sampler, self._params = sampler, params
        self._losses, self._draw_indices = losses, draw_indices
        for group in sampler.param_groups:
            if group["num_data"] != num_data:
                raise ValueError(
                    f"Invalid num_data: {group['num_data']} of the sampler (simulate() "
                    f"makes {num_data} data)"
                )
        if {*map(id, params)} != {
            id(p) for g in sampler.param_groups for p in g["params"]
        }:
            raise ValueError(
                "Invalid sampler: its parameters are not all those that it was given"
            )
        self.closure: Callable[..., Any]
        self._samples: list[list[Tensor]] | None = None
        if isinstance(sampler, SBPS):
            self.closure, self._samples = self._examples, []
            sampler.register_sample_hook(self._keep)
        elif isinstance(sampler, HMCECS):
            self.closure = self._log_likelihoods
        elif isinstance(sampler, HMC):
            self.closure = self._each_chain
        else:
            self.closure = closure_of(sampler, self._sum)

    def move(self) -> list[Tensor]:
        """One step, or one sample of an SBPS; returns where it ends."""
        if self._samples is None:
            self.sampler.step(self.closure)
            return [p.detach() for p in self._params]
        for _ in range(_MOST_EVENTS):
            if self._samples:
                return self._samples.pop(0)
            self.sampler.step(self.closure)
        raise RuntimeError(
            f"There was no sample in {_MOST_EVENTS} events: sample_interval is too long"
        )

    def _keep(self, sampler: SBPS, time: float) -> None:
        assert self._samples is not None
        self._samples.append([p.detach().clone() for p in self._params])

    # The mean loss of each simulation: what is summed is that of independent chains,
    # each with the gradient that it would have alone.

    def _sum(self) -> Tensor:
        return self._losses(self._draw_indices()).mean(1).sum()

    def _each_chain(self) -> Tensor:
        rows = self._losses(self._draw_indices()).mean(1)
        rows.sum().backward()
        chains = self.sampler.param_groups[0]["num_chains"]
        return rows.detach() if chains is not None else rows.sum().detach()

    # One chain for all simulations, in the product of their posteriors.

    def _examples(self) -> Tensor:
        return self._losses(self._draw_indices()).sum(0)

    def _log_likelihoods(self, indices: Tensor) -> Tensor:
        return -self._losses(indices).sum(0)
