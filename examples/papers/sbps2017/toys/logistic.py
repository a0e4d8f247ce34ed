"""The paper's logistic regression: its data, and what its posterior is like."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize, special
from torch import Tensor
from torch.nn import functional as F

import torch_sgmcmc as sg

Array = NDArray[np.float64]

NUM_DATA = 1000
BATCH_SIZE = 100
WIDE = 6.0  # variance of the first covariate; all others have 1


@dataclass(frozen=True)
class Problem:
    """Covariates x [N, d] and labels y [N] in {0, 1}; the prior is flat.

    U(w) is the negative log-likelihood of all data.
    """

    x: Array
    y: Array

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The same x and y."""
        return torch.from_numpy(self.x), torch.from_numpy(self.y)

    @cached_property
    def digest(self) -> str:
        """The identity of the data."""
        return hashlib.sha256(self.x.tobytes() + self.y.tobytes()).hexdigest()

    def energy(self, w: Array) -> Array:
        """U of each row of w [..., d]."""
        z = w @ self.x.T
        return np.sum(np.logaddexp(0, z) - self.y * z, axis=-1)

    def gradient(self, w: Array) -> Array:
        """The gradient of U at each row of w [..., d]."""
        return (special.expit(w @ self.x.T) - self.y) @ self.x

    def hessian(self, w: Array) -> Array:
        """The Hessian of U at w [d]."""
        p = special.expit(self.x @ w)
        return (self.x * (p * (1 - p))[:, None]).T @ self.x

    @cached_property
    def mode(self) -> Array:
        """The maximum-likelihood estimate ŵ."""
        start = np.zeros(self.x.shape[1])
        found = optimize.minimize(
            self.energy,
            start,
            jac=self.gradient,
            hess=self.hessian,
            method="trust-exact",
        )
        if not found.success:
            raise RuntimeError(f"The mode was not found: {found.message}")
        # A step of Newton's, to rounding.
        step = np.linalg.solve(self.hessian(found.x), self.gradient(found.x))
        return found.x - step

    @cached_property
    def covariance(self) -> Array:
        """The Laplace approximation's covariance: the inverse Hessian at the mode."""
        return np.linalg.inv(self.hessian(self.mode))

    @cached_property
    def extremes(self) -> Array:
        """Unit vectors [2, d] along which the covariance is largest and smallest."""
        _, vectors = np.linalg.eigh(self.covariance)
        return np.stack([vectors[:, -1], vectors[:, 0]])

    def along_extremes(self, w: Array) -> Array:
        """Distances [..., 2] from the mode along both extreme directions."""
        return (w - self.mode) @ self.extremes.T

    def laplace_draws(self, count: int, seed: int, *, scale: float = 1.0) -> Array:
        """Draws [count, d] of N(ŵ, ``scale`` times the Laplace covariance)."""
        random = np.random.default_rng(seed)
        return random.multivariate_normal(
            self.mode, scale * self.covariance, size=count
        )

    def posterior_draws(self, count: int, seed: int, *, steps: int = 20) -> Array:
        """Draws [count, d] of the posterior, by HMC with all data.

        One draw of each of ``count`` chains, which start at the Laplace approximation
        and move in coordinates in which that is N(0, I).
        """
        root = torch.from_numpy(np.linalg.cholesky(self.covariance))
        mode = torch.from_numpy(self.mode)
        x, y = self.tensors
        start = np.random.default_rng(seed).standard_normal((count, len(self.mode)))
        white = torch.nn.Parameter(torch.from_numpy(start))
        sampler = sg.HMC(
            [white], 0.25, num_steps=6, num_data=1, num_chains=count, seed=seed
        )

        def closure() -> Tensor:
            sampler.zero_grad()
            logits = (white @ root.T + mode) @ x.T
            energies = F.softplus(logits).sum(dim=1) - logits @ y
            energies.sum().backward()
            return energies.detach()

        for _ in range(steps):
            sampler.step(closure)
        return (white.detach() @ root.T + mode).numpy()


def simulate(dimension: int, seed: int, *, wide: float = WIDE) -> Problem:
    """Data as in section 7.1 of the paper.

    True weights are uniform in [-5, 5], covariates are N(0, diag(``wide``, 1, ..., 1)).
    """
    random = np.random.default_rng(seed)
    weights = random.uniform(-5, 5, dimension)
    x = random.standard_normal((NUM_DATA, dimension))
    x[:, 0] *= np.sqrt(wide)
    y = (random.random(NUM_DATA) < special.expit(x @ weights)).astype(float)
    return Problem(x, y)
