"""Statistical tests of samplers: many independent chains against an exact law.

On a Gaussian target a sampler is a linear Gaussian recursion, so the law of the
*discretised* chain is known exactly at every step, and no step size is too large to
test with. One tensor of shape [chains, d] runs all chains at once
(updates are elementwise), so that the final states are independent replicates:
Monte-Carlo standard errors need no autocorrelation estimate and are exact too.

Note [False alarms]
Every ``check_*`` function raises :class:`StatisticalError` with probability
:data:`FALSE_ALARM` = 1e-5 when the sampler is right. A check of m statistics uses
the threshold |z| < Φ⁻¹(1 - FALSE_ALARM / 2m) (Bonferroni: 4.4 for m = 1, 6.0 for
m = 5000). Sums of fourth powers are normal only approximately: with 10,000 chains
and more, an Edgeworth term raises their tails up to tenfold, and as they are few
that at most doubles the rate of a check. All tests together make about 200 checks of
samplers that are right, so the suite's false-alarm rate over the choice of seeds is
below 5e-3; and seeds are fixed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, stats

Array = NDArray[np.float64]

FALSE_ALARM = 1e-5


class StatisticalError(AssertionError):
    """The samples do not follow the expected law."""


def check_z(scores: Mapping[str, float | Array], *, label: str) -> None:
    """Raises if any z-score, of numbers or arrays, is beyond what chance explains."""
    flat = {name: np.abs(np.asarray(z, dtype=float)) for name, z in scores.items()}
    tests = sum(z.size for z in flat.values())
    threshold = stats.norm.isf(FALSE_ALARM / 2 / tests)
    # Written so that a NaN is an alarm.
    alarms = {name: z for name, z in flat.items() if not np.all(z < threshold)}
    if not alarms:
        return
    lines = [f"{label}: of {tests} z-scores some are beyond {threshold:.2f}"]
    for name, z in alarms.items():
        count = int(np.sum(~(z < threshold)))
        lines.append(f"  {name}: {count} of {z.size}, largest {np.max(z):.1f}")
    raise StatisticalError("\n".join(lines))


def check_p(p_values: Mapping[str, float], *, label: str) -> None:
    """Raises if any p-value is smaller than chance explains."""
    limit = FALSE_ALARM / len(p_values)
    alarms = {name: p for name, p in p_values.items() if not p >= limit}
    if alarms:
        raise StatisticalError(f"{label}: p-values below {limit:.1e}: {alarms}")


def check_mean(samples: Array, expected: float | Array, *, label: str) -> None:
    """Checks means of independent replicates, of any law, by their own spread."""
    samples = np.asarray(samples, dtype=float)
    error = samples.std(axis=0, ddof=1) / len(samples) ** 0.5
    check_z({"mean": (samples.mean(axis=0) - expected) / error}, label=label)


def check_ks(samples: Array, law: stats.rv_continuous, *, label: str) -> None:
    """Kolmogorov-Smirnov test of independent replicates of a continuous law."""
    check_p({"KS": stats.kstest(samples, law.cdf).pvalue}, label=label)


def check_counts(counts: Array, probabilities: Array, *, label: str) -> None:
    """Chi-square test of a histogram."""
    check_p({"chi-square": chi_square(counts, probabilities)}, label=label)


def chi_square(counts: Array, probabilities: Array) -> float:
    """p-value of a histogram; bins that expect fewer than 20 are pooled."""
    expected = counts.sum() * probabilities
    rare = expected < 20
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 20:  # too little even together: into the largest bin
        largest = np.argmax(expected)
        observed[largest] += observed[-1]
        expected[largest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = np.sum((observed - expected) ** 2 / expected)
    return float(stats.chi2.sf(statistic, len(observed) - 1))


def check_gaussian(
    samples: Array, *, label: str, mean: Array | None = None, cov: Array | None = None
) -> None:
    """Checks that rows are independent draws from N(mean, cov); default: N(0, I).

    The rows are whitened with the expected law; then all means, second moments,
    skewnesses and fourth moments have known expectations and known variances.
    The pooled statistics notice small errors common to many coordinates.
    """
    z = np.asarray(samples, dtype=float)
    n, d = z.shape
    if mean is not None:
        z = z - mean
    if cov is not None:
        z = whiten(z, cov)
    second = z.T @ z / n - np.eye(d)
    deviation = np.sqrt((1 + np.eye(d)) / n)  # Var(z²) = 2, Var(z w) = 1
    square = z * z
    fourth = square * square - 3  # variance 96
    scores = {
        "mean": np.sqrt(n) * z.mean(axis=0),
        "covariance": (second / deviation)[np.tril_indices(d)],
        "third moment": np.sqrt(n / 15) * (square * z).mean(axis=0),
        "kurtosis": np.sqrt(n / 96) * fourth.mean(axis=0),
        "pooled variance": np.sqrt(n * d / 2) * (square.mean() - 1),
        "pooled kurtosis": np.sqrt(n * d / 96) * fourth.mean(),
    }
    try:
        check_z(scores, label=label)
    except StatisticalError as error:
        variances = np.array2string(square.mean(axis=0), precision=3, threshold=12)
        raise StatisticalError(
            f"{error}\n  variances relative to the expected law: {variances}"
        ) from None


@dataclass(frozen=True)
class Mixture:
    """A stationary law of θ as a mixture of the N(centre, deviation²) of its last move.

    ``rate`` is what one step leaves of a difference from the law.
    """

    centres: Array
    deviations: Array | float
    weights: Array
    rate: float = math.nan

    def burn_in(self, forgotten: float) -> int:
        return math.ceil(math.log(forgotten) / math.log(self.rate))

    def moment(self, power: int, about: float = 0.0) -> float:
        nodes, weights = np.polynomial.hermite_e.hermegauss(6)
        moves = np.asarray(self.deviations)[..., None] * nodes
        values = (self.centres[:, None] - about + moves) ** power
        return float(self.weights @ values @ weights / weights.sum())

    def probabilities(self, edges: Array) -> Array:
        """Counts in (-∞, edges[0]), [edges[0], edges[1]), ..., [edges[-1], ∞)."""
        z = ((edge - self.centres) / self.deviations for edge in edges)
        below = [self.weights @ stats.norm.cdf(row) for row in z]
        return np.diff(np.concatenate([[0.0], below, [1.0]]))

    def check(
        self,
        theta: Array,
        powers: Sequence[int],
        edges: Array,
        *,
        label: str,
        about: float = 0.0,
    ) -> None:
        """Checks moments and a histogram of independent draws."""
        expected = np.array([self.moment(k, about) for k in powers])
        check_mean((theta - about)[:, None] ** powers, expected, label=label)
        counts = np.histogram(theta, np.concatenate([[-np.inf], edges, [np.inf]]))[0]
        check_counts(counts, self.probabilities(edges), label=label)


def whiten(centred: Array, cov: Array) -> Array:
    """Rows of N(0, cov) as rows of N(0, I)."""
    factor = linalg.cholesky(cov, lower=True)
    return linalg.solve_triangular(factor, centred.T, lower=True).T


@dataclass(frozen=True)
class AffineMap:
    """One move of a linear Gaussian chain: s <- A s + b + N(0, Q)."""

    a: Array
    b: Array
    q: Array

    def then(self, later: "AffineMap") -> "AffineMap":
        """This move followed by another."""
        b, q = later.push(self.b, self.q)
        return AffineMap(later.a @ self.a, b, q)

    def power(self, count: int) -> "AffineMap":
        """This move made ``count`` times."""
        if count == 1:
            return self
        half = self.power(count // 2)
        double = half.then(half)
        return double.then(self) if count % 2 else double

    def push(self, mean: Array, cov: Array) -> tuple[Array, Array]:
        """The law of the next state, given that of this one."""
        return self.a @ mean + self.b, self.a @ cov @ self.a.T + self.q

    def stationary(self) -> tuple[Array, Array]:
        """Mean and covariance that the move preserves (discrete Lyapunov)."""
        assert self.radius() < 1, "the chain has no stationary law"
        mean = np.linalg.solve(np.eye(len(self.b)) - self.a, self.b)
        return mean, linalg.solve_discrete_lyapunov(self.a, self.q)

    def radius(self) -> float:
        """The spectral radius: how much of the start survives one move."""
        return float(np.max(np.abs(np.linalg.eigvals(self.a))))


def kick(pull: Array, shift: Array, carry: Array, noise: Array) -> AffineMap:
    """v <- carry v - pull θ + shift + N(0, noise), the state being θ and v."""
    nothing = 0 * pull
    return AffineMap(
        np.block([[np.eye(len(pull)), nothing], [-pull, np.diag(carry)]]),
        np.concatenate([0 * shift, shift]),
        np.block([[nothing, nothing], [nothing, noise]]),
    )


def move(speed: Array) -> AffineMap:
    """θ <- θ + speed v."""
    a = np.eye(2 * len(speed)) + np.diag(speed, k=len(speed))
    return AffineMap(a, np.zeros(len(a)), 0 * a)
