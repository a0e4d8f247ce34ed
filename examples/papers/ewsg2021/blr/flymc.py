"""Firefly Monte Carlo (Maclaurin and Adams, 2014), many chains at once.

Each datum has a brightness z ∈ {0, 1}, and a lower bound 0 < B(θ) ≤ L(θ) of its
likelihood. With L̃ = (L - B) / B the joint law

    p(θ, z) ∝ p(θ) ∏ₙ Bₙ(θ) ∏ over bright n of L̃ₙ(θ)

has the posterior as its marginal, and given θ each datum is bright with probability
1 - B/L. Bounds are such that ∏ Bₙ costs the same for any number of data, so that a
step evaluates the likelihoods of bright data, and of some dark ones.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .model import PRIOR_PRECISION

_ROWS = 1 << 15  # gathered at a time


class Target(Protocol):
    """A posterior whose likelihoods have lower bounds.

    Args:
        num_data: N.
    """

    num_data: int

    def log_bounds(self, theta: Tensor) -> Tensor:
        """The logarithm of p(θ) ∏ₙ Bₙ(θ) but for a constant, for θ [K, d]: [K]."""

    def log_ratio(self, theta: Tensor, chain: Tensor, datum: Tensor) -> Tensor:
        """The logarithm of Lₙ(θ) / Bₙ(θ) ≥ 1, of data n under the chains' θ: [M].

        Args:
            theta: [K, d].
            chain: [M], which row of θ.
            datum: [M].
        """


class LogisticBound:
    """Jaakkola and Jordan's bound of logistic likelihoods, tight at one θ.

    With m = s xᵀθ, log L = -log(1 + exp(-m)) and λ(ξ) = tanh(ξ/2) / 4ξ,

        log B = -log(1 + exp(-ξ)) + (m - ξ) / 2 - λ(ξ) (m² - ξ²),

    which is log L where m = ±ξ. ξ = m at the centre, which is to be near the mode.

    Args:
        x: [N, d].
        s: [N], labels -1 and 1.
        centre: [d].
        prior_precision: of the prior N(0, I / prior_precision).
    """

    def __init__(
        self,
        x: Tensor,
        s: Tensor,
        centre: Tensor,
        prior_precision: float = PRIOR_PRECISION,
    ) -> None:
        self.num_data = len(x)
        self.x = x.double()
        xi = (self.x @ centre.double()).abs()
        # λ(0) = 1/8, to which tanh(ξ/2) / 4ξ is equal in float64 far before 0.
        near = xi.clamp(min=1e-6)
        self.curvature = torch.tanh(near / 2) / (4 * near)
        self.constant = _log_cosh(xi) - self.curvature * xi**2
        self.prior_precision = prior_precision
        self.linear = 0.5 * s.double() @ self.x
        self.quadratic = self.x.T @ (self.curvature[:, None] * self.x)

    def log_bounds(self, theta: Tensor) -> Tensor:
        """-θᵀ(Σ λ x xᵀ)θ + ½ Σ s xᵀθ, and the prior's."""
        squares = torch.einsum("kd,de,ke->k", theta, self.quadratic, theta)
        prior = 0.5 * self.prior_precision * theta.square().sum(1)
        return theta @ self.linear - squares - prior

    def log_ratio(self, theta: Tensor, chain: Tensor, datum: Tensor) -> Tensor:
        """The log bound m/2 - log 2cosh(m/2): even in m, so labels do not enter."""
        m = torch.cat(
            [
                torch.einsum("md,md->m", self.x[n], theta[k])
                for k, n in zip(chain.split(_ROWS), datum.split(_ROWS), strict=True)
            ]
        )
        excess = self.curvature[datum] * m**2 + self.constant[datum] - _log_cosh(m)
        return excess.clamp(min=0)  # that rounding does not make it negative


def _log_cosh(m: Tensor) -> Tensor:
    """log(2 cosh(m / 2))."""
    return softplus(-m.abs()) + m.abs() / 2


class FlyMC:
    """Chains of FlyMC with random-walk proposals and implicit resampling of z.

    All data are dark at first, which costs nothing. A step proposes θ' = θ + h F ξ,
    ξ ~ N(0, I), with a Metropolis test on p(θ, z) that evaluates the bright data at θ'.
    Then each dark datum is proposed as bright with probability q, and every bright one
    as dark: they become so with probabilities min(1, L̃/q) and min(1, q/L̃). Bright
    data need no new evaluation for that: their L̃ at θ are kept.

    Args:
        target: whose posterior is sampled.
        theta: [K, d], where the chains start.
        step_size: h.
        brighten: q, between 0 and 1.
        seed: of all randomness.
        factor: F [d, d]; default the identity.

    Attributes:
        position: θ [K, d].
        step_size: h of each chain [K].
        evaluations: of likelihoods, by chain [K].
        accepted: proposals of θ, by chain [K].
        steps: by chain [K].
    """

    def __init__(
        self,
        target: Target,
        theta: Tensor,
        *,
        step_size: float,
        brighten: float,
        seed: int,
        factor: Tensor | None = None,
    ) -> None:
        if not 0 < brighten < 1:
            raise ValueError(f"brighten must be between 0 and 1, got {brighten}")
        if not step_size > 0:
            raise ValueError(f"step_size must be > 0, got {step_size}")
        chains = len(theta)
        self.target = target
        self.position = theta.double().clone()
        self.step_size = torch.full((chains,), step_size, dtype=torch.float64)
        self.brighten = brighten
        self.factor = factor
        self.evaluations = torch.zeros(chains, dtype=torch.int64)
        self.accepted = torch.zeros(chains, dtype=torch.int64)
        self.steps = torch.zeros(chains, dtype=torch.int64)
        self._generator = torch.Generator().manual_seed(seed)
        self._log_bounds = target.log_bounds(self.position)
        # Bright data of all chains, in order: chain * N + datum, and log L̃ of each.
        self._bright = torch.empty(0, dtype=torch.int64)
        self._log_odds = torch.empty(0, dtype=torch.float64)

    @property
    def bright(self) -> tuple[Tensor, Tensor]:
        """Chains and data of all that is bright."""
        return self._of(self._bright)

    def step(self, budget: float = math.inf) -> bool:
        """Moves the chains that have made fewer evaluations than the budget.

        Their last step may go beyond it. Returns False if there are none.
        """
        moving = self.evaluations < budget
        if not moving.any():
            return False
        self._move_position(moving)
        self._move_brightness(moving)
        self.steps += moving
        return True

    def warm_up(self, budget: float, acceptance: float = 0.234) -> None:
        """Adapts h of each chain to an acceptance rate, by stochastic approximation.

        It goes on until the budget is spent. What is drawn meanwhile is not from the
        posterior; afterwards h is fixed.
        """
        steps, accepted = self.steps.clone(), self.accepted.clone()
        count = 0
        while self.step(budget):
            count += 1
            surplus = self.accepted - accepted - acceptance * (self.steps - steps)
            self.step_size *= torch.exp(2 * surplus / count**0.6)
            steps, accepted = self.steps.clone(), self.accepted.clone()

    def draw_brightness(self) -> None:
        """Draws all z given θ; evaluates all data."""
        everything = torch.arange(len(self.position) * self.target.num_data)
        log_odds = self._evaluate(self.position, everything)
        bright = self._uniform(len(everything)) < torch.sigmoid(log_odds)
        self._bright, self._log_odds = everything[bright], log_odds[bright]

    def _move_position(self, moving: Tensor) -> None:
        noise = torch.randn(
            self.position.shape, generator=self._generator, dtype=torch.float64
        )
        if self.factor is not None:
            noise = noise @ self.factor.T
        proposal = self.position + self.step_size[:, None] * noise
        log_bounds = self.target.log_bounds(proposal)
        chain, _ = self.bright
        asked = moving[chain]
        log_odds = self._log_odds.clone()
        log_odds[asked] = self._evaluate(proposal, self._bright[asked])
        change = log_bounds - self._log_bounds
        change.index_add_(0, chain, log_odds - self._log_odds)
        accept = moving & (self._uniform(len(change)).log() < change)
        self.position = torch.where(accept[:, None], proposal, self.position)
        self._log_bounds = torch.where(accept, log_bounds, self._log_bounds)
        self._log_odds = torch.where(accept[chain], log_odds, self._log_odds)
        self.accepted += accept

    def _move_brightness(self, moving: Tensor) -> None:
        proposed = self._thin(len(self.position) * self.target.num_data)
        proposed = proposed[moving[self._of(proposed)[0]]]
        proposed = proposed[~torch.isin(proposed, self._bright)]
        log_odds = self._evaluate(self.position, proposed)
        lit = self._uniform(len(proposed)).log() < self._log_lit(log_odds)
        goes = self._uniform(len(self._bright)).log() < self._log_gone(self._log_odds)
        stays = ~(goes & moving[self.bright[0]])
        bright = torch.cat([self._bright[stays], proposed[lit]])
        self._bright, order = bright.sort()
        self._log_odds = torch.cat([self._log_odds[stays], log_odds[lit]])[order]

    def _log_lit(self, log_odds: Tensor) -> Tensor:
        """The log probability L̃ / q that a proposed dark datum becomes bright."""
        return log_odds - math.log(self.brighten)

    def _log_gone(self, log_odds: Tensor) -> Tensor:
        """The log probability q / L̃ that a bright datum becomes dark."""
        return math.log(self.brighten) - log_odds

    def _evaluate(self, theta: Tensor, places: Tensor) -> Tensor:
        """The logarithms of L̃ of data, which it counts."""
        chain, datum = self._of(places)
        self.evaluations += torch.bincount(chain, minlength=len(theta))
        ratio = self.target.log_ratio(theta, chain, datum)
        return ratio + torch.log(-torch.expm1(-ratio))  # log(exp(ratio) - 1)

    def _thin(self, count: int) -> Tensor:
        """Each of 0, ..., count - 1 with probability q, by the gaps in between."""
        parts = []
        last = -1
        while last < count:
            size = int(self.brighten * (count - last)) + 1
            gaps = torch.empty(size, dtype=torch.int64)
            gaps.geometric_(self.brighten, generator=self._generator)
            parts.append(last + gaps.cumsum(0))
            last = int(parts[-1][-1])
        places = torch.cat(parts)
        return places[places < count]

    def _of(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Chains and data."""
        chain = places // self.target.num_data
        return chain, places - chain * self.target.num_data

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator, dtype=torch.float64)
