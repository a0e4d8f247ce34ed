"""SBPS in NumPy on targets with known laws.

:class:`ReferenceSBPS` shares the bounce clock with the library, which has tests of its
own in C++, and nothing else. It is fast enough for many replicates: each starts from
the target and a uniform velocity, which is stationary, so that time averages are
unbiased from the start and replicates are independent.

Some bugs cannot be seen in averages. A missing factor 1 - n / N only makes the clock
more careful: ``check_noise`` detects it. Refreshments at another rate leave the target
as it is: ``check_refreshments`` checks their times and velocities.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator
from scipy import stats

import torch_sgmcmc._C as _C
from harness.statistics import Array, check_ks, check_mean, check_z


@dataclass(frozen=True)
class Sight:
    """An observation at one place: G, c², and the gradient of U / T."""

    value: float
    variance: float
    gradient: Array


class Target(Protocol):
    """A law to sample, observed through minibatches."""

    dimension: int

    def draw(self, random: Generator) -> Array:
        """A point of the law."""

    def batch(self, random: Generator) -> Any:
        """A minibatch, or the noise of a gradient."""

    def observe(self, theta: Array, direction: Array, batch: Any) -> Sight:
        """Returns the observation of a minibatch at θ."""


class Gaussian:
    """N(c, T H⁻¹)."""

    hessian: Any
    centre: Any
    temperature: float

    @property
    def covariance(self) -> Array:
        return self.temperature * np.linalg.inv(self.hessian)

    def draw(self, random: Generator) -> Array:
        return random.multivariate_normal(self.centre, self.covariance)


@dataclass(frozen=True)
class Noisy(Gaussian):
    """N(c, T H⁻¹), the gradient of U exact or with noise of covariance S."""

    hessian: Array
    centre: Array
    noise: Array | None = None
    temperature: float = 1.0

    @property
    def dimension(self) -> int:
        return len(self.centre)

    def batch(self, random: Generator) -> Array:
        white = random.standard_normal(self.dimension)
        return white if self.noise is None else np.linalg.cholesky(self.noise) @ white

    def observe(self, theta: Array, direction: Array, batch: Array) -> Sight:
        gradient = self.hessian @ (theta - self.centre)
        variance = 0.0
        if self.noise is not None:
            gradient = gradient + batch
            variance = float(direction @ self.noise @ direction)
        gradient = gradient / self.temperature
        variance /= self.temperature**2
        return Sight(float(direction @ gradient), variance, gradient)


@dataclass(frozen=True)
class GaussianData(Gaussian):
    """The mean of Gaussian data of precision P, minibatches without replacement.

    ℓᵢ = (θ - xᵢ)ᵀ P (θ - xᵢ) / 2: the posterior is N((N P + λ)⁻¹ N P x̄,
    T (N P + λ)⁻¹).
    """

    data: Array
    precision: Array
    n: int
    prior_precision: float = 0.0
    temperature: float = 1.0
    replacement: bool = False

    @property
    def dimension(self) -> int:
        return self.data.shape[1]

    @property
    def hessian(self) -> Array:
        eye = np.eye(self.dimension)
        return len(self.data) * self.precision + self.prior_precision * eye

    @property
    def centre(self) -> Array:
        pull = len(self.data) * self.precision @ self.data.mean(axis=0)
        return np.linalg.solve(self.hessian, pull)

    def batch(self, random: Generator) -> Array:
        how = {"replace": self.replacement, "shuffle": False}
        return random.choice(len(self.data), self.n, **how)

    def gradients(self, theta: Array, batch: Array) -> Array:
        """Returns the gradients of the examples' losses."""
        return (theta - self.data[batch]) @ self.precision

    def observe(self, theta: Array, direction: Array, batch: Array) -> Sight:
        size, n = len(self.data), len(batch)
        gradients = self.gradients(theta, batch)
        along = gradients @ direction
        noise = size**2 / n * along.var(ddof=1)
        if not self.replacement:
            noise *= 1 - n / size
        gradient = size * gradients.mean(axis=0) + self.prior_precision * theta
        gradient = gradient / self.temperature
        return Sight(float(gradient @ direction), noise / self.temperature**2, gradient)


@dataclass(frozen=True)
class LogisticData(GaussianData):
    """Logistic regression: ℓᵢ = log(1 + exp(-yᵢ xᵢ·θ)), the data being yᵢ xᵢ.

    The law is known by quadrature, in two dimensions.
    """

    grid: int = 150

    def potential(self, theta: Array) -> Array:
        """U at points [..., d]."""
        margins = theta @ self.data.T
        loss = np.logaddexp(0, -margins).sum(axis=-1)
        return loss + self.prior_precision / 2 * (theta**2).sum(axis=-1)

    def gradients(self, theta: Array, batch: Array) -> Array:
        x = self.data[batch]
        return -x / (1 + np.exp(x @ theta))[:, None]

    @cached_property
    def law(self) -> tuple[Array, Array]:
        """Points of a grid and their probabilities."""
        theta = np.zeros(self.dimension)
        everything = np.arange(len(self.data))
        for _ in range(50):  # Newton's method to the mode
            x, p = self.data, 1 / (1 + np.exp(self.data @ theta))
            curvature = (x.T * (p * (1 - p))) @ x
            curvature += self.prior_precision * np.eye(self.dimension)
            slope = self.gradients(theta, everything).sum(axis=0)
            slope += self.prior_precision * theta
            theta = theta - np.linalg.solve(curvature, slope)
        axes = np.linalg.cholesky(self.temperature * np.linalg.inv(curvature))
        z = np.linspace(-9, 9, self.grid)
        white = np.stack(np.meshgrid(z, z), axis=-1).reshape(-1, 2)
        points = theta + white @ axes.T
        u = self.potential(points) / self.temperature
        weights = np.exp(u.min() - u)
        return points, weights / weights.sum()

    def draw(self, random: Generator) -> Array:
        points, weights = self.law
        return points[random.choice(len(points), p=weights)]


def on_sphere(random: Generator, d: int) -> Array:
    v = random.standard_normal(d)
    return v / np.linalg.norm(v)


class ReferenceSBPS:
    """One trajectory, the clock and the rest of one seed.

    ``num_std`` is k; ``scale`` the diagonal of A (None is the identity); ``start`` is θ
    and v (None draws them); ``velocity`` draws that of a refreshment in a step.
    """

    def __init__(
        self,
        target: Target,
        seed: int,
        *,
        num_std: float = 3.0,
        observation_decay: float = 0.0,
        refresh_rate: float = 0.0,
        scale: Array | None = None,
        start: tuple[Array, Array] | None = None,
        velocity: Callable[[int], Array] | None = None,
    ) -> None:
        self.target, self.seed = target, seed
        self.num_std, self.refresh_rate = num_std, refresh_rate
        self.random = np.random.default_rng(seed)
        d = target.dimension
        self.scale = np.ones(d) if scale is None else scale
        if start is None:
            start = target.draw(self.random), on_sphere(self.random, d)
        self.theta, self.v = start
        self.velocity = velocity or (lambda step: on_sphere(self.random, d))
        self.clock = _C.BounceClock()
        self.clock.observation_decay = observation_decay
        self.step_count = 0
        self.time = 0.0
        self.first = np.zeros(d)
        self.second = np.zeros((d, d))
        self.bounces = self.proposals = self.violations = 0

    @property
    def direction(self) -> Array:
        return self.scale * self.v

    def step(self, batch: Any = None) -> None:
        key = {"seed": self.seed, "step": self.step_count}
        event, wait, rate = self.clock.next(self.num_std, self.refresh_rate, **key)
        self.average(wait)
        self.theta = self.theta + wait * self.direction
        if event == _C.REFRESHMENT:
            self.v = self.velocity(self.step_count)
        if batch is None:
            batch = self.target.batch(self.random)
        sight = self.target.observe(self.theta, self.direction, batch)
        is_proposal = event == _C.PROPOSAL
        accepted = is_proposal and self.clock.accepts(rate, sight.value, **key)
        self.proposals += is_proposal
        self.violations += is_proposal and sight.value > rate
        if accepted:
            g = self.scale * sight.gradient
            self.v = self.v - 2 * (self.v @ g) / (g @ g) * g
            self.clock.bounce(wait, sight.value, sight.variance, -sight.value)
            self.bounces += 1
        elif event == _C.REFRESHMENT:
            self.clock.restart()
            self.clock.observe(0.0, sight.value, sight.variance)
        else:
            self.clock.observe(wait, sight.value, sight.variance)
        self.step_count += 1

    def average(self, wait: float) -> None:
        """Adds the integrals of θ and θ θᵀ over a piece of a line."""
        u = self.direction
        middle = self.theta + wait / 2 * u
        self.first += wait * middle
        self.second += wait * (np.outer(middle, middle) + wait**2 / 12 * np.outer(u, u))
        self.time += wait


def check_average(
    target: Any,
    *,
    mean: Array,
    cov: Array,
    replicates: int = 40,
    events: int = 500,
    seed: int = 1,
    label: str = "time averages",
    **settings: Any,
) -> ReferenceSBPS:
    """Checks the time averages of θ and of (θ - mean)(θ - mean)ᵀ of many replicates.

    A ratio of means: each replicate counts by its trajectory time. Returns the last.
    """
    rows = []
    for i in range(replicates):
        chain = ReferenceSBPS(target, 1000 * seed + i, **settings)
        for _ in range(events):
            chain.step()
        first = chain.first - chain.time * mean
        cross = np.outer(chain.first, mean)
        second = chain.second - cross - cross.T + chain.time * np.outer(mean, mean)
        lower = np.tril_indices(len(mean))
        rows.append(np.concatenate([first, (second - chain.time * cov)[lower]]))
    check_mean(np.array(rows), 0.0, label=label)
    return chain


def check_noise(target: Any, observe: Callable[..., Sight], *, seed: int = 1) -> None:
    """Checks that c² is the variance of G over minibatches, by its mean."""
    random = np.random.default_rng(seed)
    theta, u = target.draw(random), on_sphere(random, target.dimension)
    seen = [observe(theta, u, target.batch(random)) for _ in range(20_000)]
    values = np.array([s.value for s in seen])
    excess = (values - values.mean()) ** 2 - np.array([s.variance for s in seen])
    check_mean(excess, 0.0, label="noise of a minibatch")


class Refreshments:
    """Statistics of a trajectory's refreshments, which should have this rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.waits: list[float] = []  # trajectory times between refreshments
        self.before: list[Array] = []  # velocities
        self.after: list[Array] = []
        self.bounces = 0
        self._wait = 0.0
        # Times on lines that a bounce began and on others, and refreshments there.
        self._bounced = False
        self._times, self._counts = [0.0, 0.0], [0, 0]

    def add(
        self, refreshed: bool, bounced: bool, wait: float, before: Array, after: Array
    ) -> None:
        """One event, the trajectory time to it, and velocities before and after."""
        self._wait += wait
        self._times[self._bounced] += wait
        self._counts[self._bounced] += refreshed
        self.bounces += bounced
        if refreshed:
            self.waits.append(self._wait)
            self._wait = 0.0
            self.before.append(before)
            self.after.append(after)
        if refreshed or bounced:
            self._bounced = bounced

    def excess(self) -> dict[str, float]:
        """z-scores of the numbers of refreshments, for the times that there were."""
        names = ("after refreshments", "after bounces")
        expected = [self.rate * time for time in self._times]
        return {
            name: (count - e) / e**0.5
            for name, count, e in zip(names, self._counts, expected, strict=True)
            if e > 0
        }


def check_refreshments(seen: Refreshments) -> None:
    """Checks that refreshments are a Poisson process, and velocities uniform.

    Times between them are exponential and independent, their rate is the same on lines
    that a bounce began as on others, and a new velocity knows nothing of the old one.
    """
    waits = seen.rate * np.array(seen.waits)
    n = len(waits)
    check_ks(waits, stats.expon, label="times between refreshments")
    scores = {
        "mean": (waits.mean() - 1) * n**0.5,
        "neighbours": (waits[1:] - 1) @ (waits[:-1] - 1) / (n - 1) ** 0.5,
        **seen.excess(),
    }
    check_z(scores, label="times between refreshments")
    before, after = np.array(seen.before), np.array(seen.after)
    check_sphere(after)
    cosine = (before * after).sum(axis=1)
    powers = np.stack([cosine, cosine**2], axis=1)
    check_mean(powers, np.array([0, 1 / after.shape[1]]), label="old and new velocity")


def check_sphere(velocities: Array) -> None:
    """Checks that rows are uniform on the unit sphere, by moments up to the fourth."""
    n, d = velocities.shape
    np.testing.assert_allclose(np.linalg.norm(velocities, axis=1), 1, atol=2e-6)
    square = velocities**2
    fourth = (square**2).mean(axis=1)
    expected = 3 / (d * (d + 2))
    check_mean(velocities, 0.0, label="velocities")
    check_mean(square, 1 / d, label="squares of velocities")
    z = (fourth.mean() - expected) / (fourth.std(ddof=1) / n**0.5)
    check_z({"fourth moment": z}, label="velocities")
