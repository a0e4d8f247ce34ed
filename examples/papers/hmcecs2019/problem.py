"""A logistic regression with many data, and its posterior."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

import torch_sgmcmc as sg

# Rows whose features in float64 stay in a core's cache.
_CHUNK = 8192


@dataclass(frozen=True)
class Laplace:
    """The Laplace approximation of a posterior.

    Args:
        mode: [d].
        hessian: [d, d], of U at the mode.
        passes: through the data that finding it has cost.
    """

    mode: Tensor
    hessian: Tensor
    passes: int

    @cached_property
    def root(self) -> Tensor:
        """W with W Wᵀ the inverse Hessian: θ = mode + W φ makes the posterior round."""
        eye = torch.eye(len(self.mode), dtype=torch.float64)
        upper = torch.linalg.cholesky(self.hessian).T
        return torch.linalg.solve_triangular(upper, eye, upper=True)

    @property
    def deviations(self) -> Tensor:
        """[d], the standard deviations."""
        return self.root.square().sum(1).sqrt()


@dataclass(frozen=True)
class Covariate:
    """The covariate against which probabilities are shown.

    Args:
        name: for an axis.
        values: [n], of the data.
    """

    name: str
    values: Tensor


@dataclass(frozen=True)
class Problem:
    """Features and labels; the prior is N(0, 1 / ``prior_precision``).

    Args:
        name: of the data, for files and titles.
        x: [n, d], float32, in memory or mapped into it; the intercept is a column.
        y: [n], float32, 0 or 1.
        test_x: rows to predict.
        test_y: and their labels.
        prior_precision: of each coefficient.
        covariate: of figure 6; None has no such figure.
    """

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    prior_precision: float = 1.0
    covariate: Covariate | None = None

    @cached_property
    def identity(self) -> list[str | int | float]:
        """The identity of a run's data: sizes, and a hash of some rows."""
        some = slice(None, None, max(1, len(self.x) // 1000))
        digest = hashlib.sha256(self.x[some].contiguous().numpy().tobytes())
        digest.update(self.y[some].contiguous().numpy().tobytes())
        return [self.name, *self.x.shape, self.prior_precision, digest.hexdigest()[:16]]

    @property
    def dimension(self) -> int:
        """The number of coefficients, d."""
        return self.x.shape[1]

    def part(self, count: int, seed: int) -> Problem:
        """So many of the data, chosen at random without replacement."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self.x), generator=generator)[:count].sort().values
        return Problem(
            f"{self.name}-part",
            self.x[chosen],
            self.y[chosen],
            self.test_x[:0],
            self.test_y[:0],
            self.prior_precision,
        )

    def log_likelihoods(self, theta: Tensor) -> sg.PredictorLogLikelihood:
        """HMC-ECS's closure: those of the data with given indices, at ``theta`` [d]."""

        # As long as the subsample is the same, the very same indices come.
        @lru_cache(maxsize=2)
        def rows(indices: Tensor) -> tuple[Tensor, Tensor]:
            return self.x[indices].double(), self.y[indices].double()

        return sg.PredictorLogLikelihood(
            lambda indices: rows(indices)[0] @ theta,
            lambda eta, indices: rows(indices)[1] * eta - F.softplus(eta),
            rows=lambda indices: rows(indices)[0],
        )

    def potential(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """U and its gradient with all data, for θ [K, d]: [K] and [K, d]."""
        value = 0.5 * self.prior_precision * theta.square().sum(1)
        gradient = self.prior_precision * theta
        for x, y in self._chunks():
            eta = x @ theta.T
            value += F.softplus(eta).sum(0) - y @ eta
            gradient += (torch.sigmoid_(eta) - y[:, None]).T @ x
        return value, gradient

    def laplace(self, start: Tensor) -> Laplace:
        """Newton's method with a line search, from a start [d]."""
        theta, passes = start.clone(), 0
        eye = torch.eye(self.dimension, dtype=torch.float64)
        value = float(self.potential(theta[None])[0])
        for _ in range(100):
            gradient = self.prior_precision * theta
            hessian = self.prior_precision * eye
            for x, y in self._chunks():
                p = torch.sigmoid(x @ theta)
                gradient += (p - y) @ x
                hessian += (x * (p * (1 - p))[:, None]).T @ x
            passes += 1
            move = torch.linalg.solve(hessian, gradient)
            decrement = float(move @ gradient)
            if decrement < 1e-6:  # the squared distance in posterior deviations
                return Laplace(theta - move, hessian, passes)
            size, enough = 1.0, False
            while not enough and size > 1e-6:
                tried = float(self.potential((theta - size * move)[None])[0])
                passes += 1
                enough = tried <= value - 0.25 * size * decrement
                size /= 2
            theta, value = theta - 2 * size * move, tried
        raise RuntimeError(
            f"Newton's method did not converge on {self.name}: its last step had the "
            f"length {decrement**0.5:.3g} in posterior standard deviations"
        )

    def predict(self, theta: Tensor, weights: Tensor) -> Tensor:
        """p(y = 1) of the test rows: the weighted mean over draws [R, d]."""
        parts = [
            torch.sigmoid(x.double() @ theta.T) @ weights
            for x in self.test_x.split(_CHUNK)
        ]
        return torch.cat(parts) / weights.sum()

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in zip(self.x.split(_CHUNK), self.y.split(_CHUNK), strict=True):
            yield x.double(), y.double()
