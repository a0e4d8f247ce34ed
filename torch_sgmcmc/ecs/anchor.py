"""θ* of HMC-ECS: where it is, the sums around it, and the mass that goes with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.closures import exchanged
from torch_sgmcmc.chain.operators import gaussian_
from torch_sgmcmc.chain.progress import progress_bar
from torch_sgmcmc.ecs.expansions import kept_of, sum_up, sums_of
from torch_sgmcmc.ecs.likelihood_graph import Closure, flat, log_likelihoods
from torch_sgmcmc.ecs.prior import Prior
from torch_sgmcmc.ecs.taylor import TaylorSums, TaylorTerms
from torch_sgmcmc.ecs.whitening import whitening

__all__ = ["AllData", "Anchor", "split"]


def split(theta: Tensor, params: list[Tensor]) -> list[Tensor]:
    """A row's parts in the shapes and types of the parameters."""
    parts = theta.split([p.numel() for p in params])
    return [
        part.view(p.shape).to(p.dtype) for part, p in zip(parts, params, strict=True)
    ]


@dataclass(frozen=True)
class AllData:
    """All log-likelihoods, chunk by chunk."""

    closure: Closure
    params: list[Tensor]
    num_data: int
    chunk_size: int
    seed: int

    def chunks(self, label: str, progress: bool) -> Iterable[Tensor]:
        """The indices of all data."""
        n, size, device = self.num_data, self.chunk_size, self.params[0].device
        for begin in progress_bar(range(0, n, size), label, progress):
            yield torch.arange(begin, min(n, begin + size), device=device)

    def log_likelihood(self, progress: bool) -> Tensor:
        """Their sum, at the parameters as they are."""
        sums = []
        for chunk in self.chunks("log posterior", progress):
            with torch.enable_grad():
                values = log_likelihoods(self.closure, chunk)
            sums.append(values.detach().double().sum())
        return torch.stack(sums).sum()

    def probe(self, like: Tensor) -> Tensor:
        """A random direction, as the parameters' type rounds it."""
        probe = torch.empty_like(like)
        stream = {"purpose": _C.Purpose.PROBE, "seed": self.seed, "step": 0}
        gaussian_([probe], std=1.0, offsets=[0], **stream)
        return flat(split(probe, self.params)).double()


@dataclass(frozen=True)
class Anchor:
    """The control variates of a sampler."""

    theta: Tensor  # [d], in float64
    num_data: int
    sums: TaylorSums
    whitening: Tensor | None

    @classmethod
    def choose(
        cls,
        data: AllData,
        theta: Tensor,
        prior: Prior,
        group: dict[str, Any],
        progress: bool,
    ) -> Anchor:
        """With θ* there, by a pass through all data.

        The group says which expansions, which mass, and the temperature.
        """
        there = split(theta, data.params)
        theta = flat(there).double()  # as it is rounded
        order = group["control_variate"]
        with exchanged(data.params, there):
            sums = sum_up(
                data.closure,
                data.params,
                partial(data.chunks, "control variates", progress),
                data.probe(theta),
                control_variate=order,
                with_hessian=order == 2 or group["mass_matrix"] != "identity",
            )
        finite = (sums.value, sums.gradient, sums.hessian)
        if not all(t is None or bool(t.isfinite().all()) for t in finite):
            raise RuntimeError(
                "HMCECS got log-likelihoods or derivatives that are not finite at the "
                "anchor of the control variates"
            )
        bent = sums.hessian
        if bent is not None:
            bent = (prior.precision.diag() - bent) / group["temperature"]
        mass = whitening(group["mass_matrix"], bent)
        return cls(theta, data.num_data, sums, mass)

    def expand(self, data: AllData, indices: Tensor) -> TaylorTerms:
        """The expansions of the data with these indices."""
        params = data.params
        with exchanged(params, split(self.theta, params)):
            return TaylorTerms.at_present(
                data.closure, params, indices, self.sums.form, self.theta
            )

    def check_near(
        self, log_likelihood: Tensor, theta: Tensor, prior: Prior, temperature: float
    ) -> None:
        """Raises if the log posterior fell from θ* to θ as it falls to no draw."""
        change = log_likelihood - self.sums.value
        change = change - prior.energy(theta)
        change = change + prior.energy(self.theta)
        fall, highest = -float(change) / temperature, _C.deepest_fall(len(theta))
        if not fall <= highest:
            raise RuntimeError(
                "HMCECS has left the posterior: the log posterior of all data is "
                f"{fall:.4g} below that at θ* (that of draws is at most {highest:.4g} "
                "below). Start again nearer the mode, with variant='perturbed', "
                "control_variate=2, or a larger subsample_size or num_products"
            )

    def save(self) -> dict[str, Any]:
        """For the sampler's state: tensors, numbers and strings."""
        return {
            "anchor": self.theta,
            "num_data": self.num_data,
            **kept_of(self.sums),
            "whitening": self.whitening,
        }

    @classmethod
    def load(cls, kept: dict[str, Any]) -> Anchor:
        return cls(kept["anchor"], kept["num_data"], sums_of(kept), kept["whitening"])
