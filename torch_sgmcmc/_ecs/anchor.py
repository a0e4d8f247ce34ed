"""The expansions' anchor θ* of HMC-ECS: sums over all data, prior and mass there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc._ecs.likelihood import Closure, flat, log_likelihoods, split
from torch_sgmcmc._ecs.taylor import (
    CONSTANT,
    LINEAR,
    PREDICTOR,
    WHOLE,
    TaylorSums,
    TaylorTerms,
    has_rows,
)
from torch_sgmcmc._impl.closures import exchanged
from torch_sgmcmc._impl.ops import gaussian_
from torch_sgmcmc._impl.utils import progress_bar


@dataclass(frozen=True)
class Prior:
    """The Gaussian prior: precision and mean of each element, [d] in float64."""

    precision: Tensor
    mean: Tensor

    def gradient(self, theta: Tensor) -> Tensor:
        """Returns λ (θ - μ)."""
        return self.precision * (theta - self.mean)

    def energy(self, theta: Tensor) -> Tensor:
        """Returns Σ λ (θ - μ)² / 2."""
        return 0.5 * torch.dot(self.gradient(theta), theta - self.mean)


@dataclass(frozen=True)
class AllData:
    """The log-likelihoods of all data, chunk by chunk."""

    closure: Closure
    params: list[Tensor]
    num_data: int
    chunk_size: int
    seed: int

    def chunks(self, label: str, progress: bool) -> Iterable[Tensor]:
        """Yields the indices of all data."""
        n, size, device = self.num_data, self.chunk_size, self.params[0].device
        for begin in progress_bar(range(0, n, size), label, progress):
            yield torch.arange(begin, min(n, begin + size), device=device)

    def log_likelihood(self, progress: bool) -> Tensor:
        """Returns the sum of all log-likelihoods at the present parameters."""
        sums = []
        for chunk in self.chunks("log posterior", progress):
            with torch.enable_grad():
                values = log_likelihoods(self.closure, chunk)
            sums.append(values.detach().double().sum())
        return torch.stack(sums).sum()

    def probe(self, like: Tensor) -> Tensor:
        """Returns a random direction, rounded to the parameters' type."""
        probe = torch.empty_like(like)
        stream = {"purpose": _C.Purpose.PROBE, "seed": self.seed, "step": 0}
        gaussian_([probe], std=1.0, offsets=[0], **stream)
        return flat(split(probe, self.params)).double()


@dataclass(frozen=True)
class Anchor:
    """θ*, the expansions' sums there, and the mass matrix."""

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
        """Puts θ* at a place, by a pass through all data, as a param group says."""
        there = split(theta, data.params)
        theta = flat(there).double()  # as rounded
        order = group["taylor_order"]
        form = low = CONSTANT if order == 0 else LINEAR
        if order == 2 or group["mass_matrix"] != "identity":
            form = PREDICTOR if has_rows(data.closure) else WHOLE
        with exchanged(data.params, there):
            chunks = data.chunks("control variates", progress)
            sums = TaylorSums.at_present(
                data.closure, data.params, chunks, form, data.probe(theta)
            )
        finite = (sums.value, sums.gradient, sums.hessian)
        if not all(t is None or bool(t.isfinite().all()) for t in finite):
            raise RuntimeError(
                "HMCECS got log-likelihoods or derivatives that are not finite at the "
                "anchor of the control variates"
            )
        hessian = sums.hessian
        if hessian is not None:
            hessian = (prior.precision.diag() - hessian) / group["temperature"]
        mass = whitening(group["mass_matrix"], hessian)
        if order < 2:  # the Hessian was for the mass alone
            sums.form, sums.hessian = low, None
        if order == 0:
            sums.gradient = torch.zeros_like(sums.gradient)
        return cls(theta, data.num_data, sums, mass)

    def expand(self, data: AllData, indices: Tensor) -> TaylorTerms:
        """Returns the expansions of the data with these indices."""
        params = data.params
        with exchanged(params, split(self.theta, params)):
            return TaylorTerms.at_present(
                data.closure, params, indices, self.sums.form, self.theta
            )

    def check_near(
        self, log_likelihood: Tensor, theta: Tensor, prior: Prior, temperature: float
    ) -> None:
        """Raises if the log posterior fell from θ* to θ by more than to any draw."""
        change = log_likelihood - self.sums.value
        change = change - prior.energy(theta)
        change = change + prior.energy(self.theta)
        # For a log-concave density in d dimensions the fall from its mode to a draw is
        # more than d + sqrt(2 d x) + x with a probability of at most exp(-x), here with
        # x = 20: M. Fradelizi, M. Madiman and L. Wang, Optimal Concentration of
        # Information Content for Log-Concave Densities, 2016.
        fall, d = -float(change) / temperature, len(theta)
        highest = d + math.sqrt(40 * d) + 20
        if not fall <= highest:
            raise RuntimeError(
                "HMCECS has left the posterior: the log posterior of all data is "
                f"{fall:.4g} below that at θ* (that of draws is at most {highest:.4g} "
                "below). Start again nearer the mode, with estimator='perturbed', "
                "taylor_order=2, or a larger subsample_size or num_factors"
            )

    def save(self) -> dict[str, Any]:
        """Returns the sampler's state: tensors, numbers and strings."""
        return {
            "anchor": self.theta,
            "num_data": self.num_data,
            **vars(self.sums),
            "whitening": self.whitening,
        }

    @classmethod
    def load(cls, kept: dict[str, Any]) -> Anchor:
        """Returns what was saved."""
        names = ("value", "gradient", "hessian", "form")
        sums = TaylorSums(**{name: kept[name] for name in names})
        return cls(kept["anchor"], kept["num_data"], sums, kept["whitening"])


def whitening(kind: str, hessian: Tensor | None) -> Tensor | None:
    """Returns W with W Wᵀ = M⁻¹: a matrix, a diagonal, or None for the identity.

    Where the Hessian of minus the log density is not positive, curvatures are taken by
    their absolute value, but not as 0.
    """
    if kind == "identity" or hessian is None:
        return None
    if kind == "diagonal":
        return _floored(hessian.diagonal()).rsqrt()
    factor, info = torch.linalg.cholesky_ex(hessian)
    if int(info) == 0:
        identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
        inverse = torch.linalg.solve_triangular(factor.mT, identity, upper=True)
        return inverse.contiguous()
    curvatures, directions = torch.linalg.eigh(hessian)
    return (directions * _floored(curvatures).rsqrt()).contiguous()


def _floored(curvatures: Tensor) -> Tensor:
    size = curvatures.abs()
    largest = size.max()
    if not bool(largest > 0):
        return torch.ones_like(size)
    return size.clamp(min=1e-8 * float(largest))
